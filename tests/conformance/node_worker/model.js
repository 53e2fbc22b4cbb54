// A language model of sorts: what is in a slot of the cache depends on all slots before it, as a
// real model's keys and values do, and the logits depend on the last slot. Each cache group is a
// layer, which attends to what the group keeps.

import { firstVisible, isSource, isState } from "./groups.js";
import { TYPES } from "./pooling.js";

const VOCAB_SIZE = 64;

export const facts = {
  name: "node",
  fingerprint: "node-worker-1",
  architecture: "NodeHash",
  max_model_len: 4096,
  vocab_size: VOCAB_SIZE,
  dtype: "float64",
  batch_invariant: true,
  work_kinds: ["WORK_KIND_GENERATION", "WORK_KIND_POOLING"],
  pooling: { vector_size: VOCAB_SIZE, types: TYPES, default_type: TYPES[0] },
};

/** A 32-bit word that looks like nothing the words it is made of had in common. */
function mix(...words) {
  let hash = 0x9e3779b9;
  for (const word of words) {
    hash = Math.imul(hash ^ word, 0x85ebca6b);
    hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
    hash ^= hash >>> 16;
  }
  return hash >>> 0;
}

/** What the slot of a source's token holds; `media`: its part of the context. */
export const sourceSlot = ({ digest }, at) =>
  mix(...Array.from({ length: 8 }, (_, word) => digest.readInt32LE(4 * word)), at);

/** Compute a token into a sequence's memory; returns what its logits depend on. */
export function computeSlot(token, position, memory, numSourceTokens) {
  let hidden = mix(token, position);
  memory.groups.forEach((group, index) => {
    if (isState(group)) {
      memory.states[index] = memory.states[index].map((word, at) => mix(word, hidden, at));
      hidden = mix(hidden, ...memory.states[index]);
      return;
    }
    const [first, end] = isSource(group)
      ? [0, numSourceTokens]
      : [firstVisible(group, position), position];
    let attended = 0;
    for (let at = first; at < end; at++) {
      attended = (attended + mix(memory.read(index, at), at)) >>> 0;
    }
    hidden = mix(hidden, attended);
    if (!isSource(group)) memory.write(index, position, hidden);
  });
  return hidden;
}

/** Logits of the next token, given the last slot: Gumbel distributed, about half below 0. */
export function logitsAfter(slot) {
  return Array.from({ length: VOCAB_SIZE }, (_, token) => {
    const uniform = (mix(slot, token + 1) + 0.5) / 2 ** 32;
    return -2 * Math.log(-Math.log(uniform));
  });
}
