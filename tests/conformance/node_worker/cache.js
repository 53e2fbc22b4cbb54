// The memory: blocks of equal size on a "device" and a "host", which groups share.

import { PlanError } from "./errors.js";
import { NO_BLOCK, firstVisible, hasTokens, isSource, isState } from "./groups.js";
import { sourceSlot } from "./model.js";

const [WORD, POSITION] = [0, 1]; // of a block of a state: its content, the tokens that led to it

/** Slots of a block: one for each token of any group, two for a state. */
const slotsOf = (groups) => Math.max(2, ...groups.map((group) => group.block_tokens ?? 0));

export const blockBytes = (groups) =>
  groups.length > 0 ? slotsOf(groups) * Uint32Array.BYTES_PER_ELEMENT : 0;

export class Cache {
  #groupOf = new Map(); // of blocks in tables: the group, and the number of tables

  constructor(groups, numDeviceBlocks, numHostBlocks) {
    this.groups = groups;
    this.blockSize = slotsOf(groups);
    this.numDeviceBlocks = numDeviceBlocks;
    this.device = new Uint32Array(numDeviceBlocks * this.blockSize);
    this.host = new Uint32Array(numHostBlocks * this.blockSize);
  }

  /** Enter a block into a table of a group; a block is in tables of one group only. */
  hold(block, group, field) {
    if (block < 0 || block >= this.numDeviceBlocks) {
      throw new PlanError(field, `expected blocks below ${this.numDeviceBlocks}, got ${block}`);
    }
    const held = this.#groupOf.get(block) ?? { group, count: 0 };
    if (held.group !== group) {
      throw new PlanError(field, `block ${block} is in a table of group ${held.group}`);
    }
    this.#groupOf.set(block, { group, count: held.count + 1 });
  }

  release(block) {
    if (block === NO_BLOCK) return;
    const { group, count } = this.#groupOf.get(block);
    if (count > 1) this.#groupOf.set(block, { group, count: count - 1 });
    else this.#groupOf.delete(block);
  }

  /** Release the blocks whose tokens no token of a sequence to come sees. */
  releaseUnseen({ tables, numComputed }) {
    this.groups.forEach((group, index) => {
      if (!hasTokens(group)) return;
      const table = tables[index];
      const end = Math.floor(firstVisible(group, numComputed) / group.block_tokens);
      for (let at = Math.min(end, table.length) - 1; at >= 0 && table[at] !== NO_BLOCK; at--) {
        this.release(table[at]);
        table[at] = NO_BLOCK;
      }
    });
  }

  /** Swap out, swap in and copy, in this order. */
  move({ swap_out: swapOut, swap_in: swapIn, copy }) {
    this.#check("swap_out", swapOut, this.device, this.host);
    this.#check("swap_in", swapIn, this.host, this.device);
    this.#check("copy", copy, this.device, this.device);
    this.#move(swapOut, this.device, this.host);
    this.#move(swapIn, this.host, this.device);
    this.#move(copy, this.device, this.device);
  }

  #check(field, pairs, from, to) {
    const limits = [from.length / this.blockSize, to.length / this.blockSize];
    for (const pair of pairs) {
      if (pair.some((block, side) => block < 0 || block >= limits[side])) {
        throw new PlanError(field, `expected blocks below ${limits}, got ${pair}`);
      }
    }
  }

  #move(pairs, from, to) {
    const size = this.blockSize;
    // All sources are read before any target is written: they may overlap.
    const contents = pairs.map(([source]) => from.slice(source * size, (source + 1) * size));
    pairs.forEach(([, target], index) => to.set(contents[index], target * size));
  }

  /** Refuse a new sequence unless its states are those after its computed tokens. */
  checkStates({ tables, numComputed }, field) {
    this.groups.forEach((group, index) => {
      if (!isState(group) || numComputed === 0) return;
      for (const block of tables[index]) {
        const reached = this.device[block * this.blockSize + POSITION];
        if (reached !== numComputed) {
          throw new PlanError(field, `expected ${reached}, as the state in block ${block} says`);
        }
      }
    });
  }
}

/** What the layers read and write for one sequence. States are kept here until they are stored,
 *  since those after refused drafts are not. */
export class SequenceMemory {
  constructor(cache, { tables, numComputed, media }) {
    Object.assign(this, { cache, tables, groups: cache.groups });
    this.states = cache.groups.map((group, index) =>
      isState(group) ? tables[index].map((block) => this.#begin(block, numComputed)) : [],
    );
    if (numComputed === 0) this.#writeSources(media);
  }

  #begin(block, numComputed) {
    return numComputed === 0 ? 0 : this.cache.device[block * this.cache.blockSize + WORD];
  }

  #writeSources(media) {
    this.groups.forEach((group, index) => {
      if (!isSource(group)) return;
      media.forEach((part, at) => this.write(index, at, sourceSlot(part, at)));
    });
  }

  /** The place of a position, or of a token of a source. */
  #slot(group, position) {
    const size = this.groups[group].block_tokens;
    const block = this.tables[group][Math.floor(position / size)];
    return block * this.cache.blockSize + (position % size);
  }

  read(group, position) {
    return this.cache.device[this.#slot(group, position)];
  }

  write(group, position, word) {
    this.cache.device[this.#slot(group, position)] = word;
  }

  /** Write states, which `position` tokens have led to, to the blocks of some tables. */
  store(states, position, tables = this.tables) {
    states.forEach((words, group) =>
      tables[group].length > 0 && words.forEach((word, at) => {
        const first = tables[group][at] * this.cache.blockSize;
        this.cache.device[first + WORD] = word;
        this.cache.device[first + POSITION] = position;
      }),
    );
  }
}
