// What the worker remembers of sequences, and what plans may say of them.

import { readColumns } from "./columns.js";
import { PlanError } from "./errors.js";
import { MEDIA, NO_BLOCK, firstVisible, hasTokens, isSource, isState } from "./groups.js";
import { numFixedBlocks, numSlots } from "./groups.js";
import { readPooling } from "./pooling.js";
import { readParams } from "./sampler.js";

/** The tables of all groups, entries before their first block included. */
function readTables(messages, groups, numComputed, path) {
  const tables = groups.map(() => []);
  messages.forEach((message, place) => {
    const { group: index, first_index: first } = message;
    const group = groups[index];
    if (!group || tables[index].length > 0) {
      throw new PlanError(`${path}[${place}].group`, `expected 0 to ${groups.length - 1}, each once`);
    }
    const seen = hasTokens(group) ? firstVisible(group, numComputed) / group.block_tokens : 0;
    if (first > Math.floor(seen)) {
      throw new PlanError(`${path}[${place}].first_index`, `expected at most ${Math.floor(seen)}`);
    }
    const { block_ids: blocks } = readColumns("BlockTable", message, `${path}[${place}].`);
    tables[index] = [...Array(first).fill(NO_BLOCK), ...blocks];
  });
  const named = tables.flat().filter((block) => block !== NO_BLOCK);
  if (new Set(named).size !== named.length) throw new PlanError(path, "a block is named twice");
  return tables;
}

const DIGEST_BYTES = 32;
const KINDS = ["CONTEXT_KIND_SALT", "CONTEXT_KIND_ADAPTER", MEDIA];

/** The parts that each token of the source belongs to. Salts change nothing that is computed. */
function readMedia(context, groups, path) {
  return context.flatMap((part, index) => {
    const field = `${path}[${index}]`;
    if (!KINDS.includes(part.kind)) {
      throw new PlanError(`${field}.kind`, `expected SALT, ADAPTER or MEDIA, got ${part.kind}`);
    }
    if (part.digest.length !== DIGEST_BYTES) {
      throw new PlanError(`${field}.digest`, `expected 32 bytes, got ${part.digest.length}`);
    }
    if (part.kind === KINDS[0]) return [];
    if (part.kind !== MEDIA || !groups.some(isSource)) {
      throw new PlanError(`${field}.kind`, `${part.kind} is not computed here`);
    }
    if (part.length === 0) throw new PlanError(`${field}.length`, "expected that of a source");
    return Array(part.length).fill(part);
  });
}

const NO_PARAMS = { logprobs: null, promptLogprobs: null, numCandidates: null };

export class Sequences {
  #known = new Map();

  constructor(model, cache) {
    this.model = model;
    this.cache = cache;
  }

  get(id, field) {
    const sequence = this.#known.get(id);
    if (!sequence) throw new PlanError(field, `sequence ${id} is not known here`);
    return sequence;
  }

  forget(ids) {
    for (const id of ids) {
      this.get(id, "forget_seq_ids").tables.flat().forEach((block) => this.cache.release(block));
      this.#known.delete(id);
    }
  }

  /** Take in a sequence; a fork starts as its parent stands. */
  add(message, path) {
    const { seq_id: id } = message;
    if (!(id > 0 && id < 2 ** 31)) {
      throw new PlanError(`${path}.seq_id`, `expected 1 to 2^31 - 1, got ${id}`);
    }
    if (this.#known.has(id)) throw new PlanError(`${path}.seq_id`, `${id} is known already`);
    const { token_ids: tokens } = readColumns("NewSequence", message, `${path}.`);
    this.#checkTokens(tokens, `${path}.token_ids`);
    const { groups } = this.cache;
    const parent = message._parent_seq_id
      ? this.get(message.parent_seq_id, `${path}.parent_seq_id`)
      : null;
    if (parent && message.context.length > 0) {
      throw new PlanError(`${path}.context`, "expected none in a fork, which has its parent's");
    }
    const numComputed = parent?.numComputed ?? message.num_computed_tokens;
    const sequence = {
      id,
      choiceIndex: message.choice_index,
      params: message.pooling
        ? NO_PARAMS
        : readParams(message.sampling, this.model.vocab_size, `${path}.sampling`),
      pooling: readPooling(message, this.model.pooling.vector_size, path),
      promptLogprobsStart: message.prompt_logprobs_start,
      tables: readTables(message.tables, groups, numComputed, `${path}.tables`),
      media: parent?.media ?? readMedia(message.context, groups, `${path}.context`),
      parent: null,
      failure: null,
      lastLogits: null,
    };
    this.#checkComplete(sequence, `${path}.tables`);
    if (parent) this.#inherit(sequence, parent, tokens);
    else this.#begin(sequence, message, tokens, path);
    if (sequence.tokens.length > this.model.max_model_len) {
      throw new PlanError(`${path}.token_ids`, `expected at most ${this.model.max_model_len}`);
    }
    sequence.tables.forEach((table, group) => {
      const blocks = table.filter((block) => block !== NO_BLOCK);
      blocks.forEach((block) => this.cache.hold(block, group, `${path}.tables`));
    });
    if (!parent) this.cache.checkStates(sequence, `${path}.num_computed_tokens`);
    this.#known.set(id, sequence);
    return sequence;
  }

  /** States and sources have all their blocks from the beginning. */
  #checkComplete({ tables, media }, path) {
    this.cache.groups.forEach((group, index) => {
      const expected = hasTokens(group) ? tables[index].length : numFixedBlocks(group, media.length);
      if (tables[index].length !== expected) {
        throw new PlanError(path, `expected ${expected} blocks in group ${index}`);
      }
    });
  }

  #begin(sequence, message, tokens, path) {
    const { num_prompt_tokens: numPrompt, num_computed_tokens: numComputed } = message;
    if (numPrompt < 1 || numPrompt > tokens.length) {
      throw new PlanError(`${path}.num_prompt_tokens`, `expected 1 to ${tokens.length}`);
    }
    const room = Math.min(tokens.length, numSlots(this.cache.groups, sequence.tables));
    if (numComputed > room) {
      throw new PlanError(`${path}.num_computed_tokens`, `expected at most ${room}`);
    }
    Object.assign(sequence, { tokens, numPrompt, numComputed });
  }

  #inherit(sequence, parent, tokens) {
    sequence.parent = parent.id;
    sequence.tokens = [...parent.tokens, ...tokens];
    sequence.numPrompt = parent.numPrompt;
    sequence.numComputed = parent.numComputed;
    sequence.failure = parent.failure;
  }

  /** Append the tokens that the core chose. */
  append(pairs) {
    const field = "appended_tokens";
    if (new Set(pairs.map(([id]) => id)).size !== pairs.length) {
      throw new PlanError(field, "a sequence is named twice");
    }
    for (const [id, token] of pairs) {
      const { params, tokens } = this.get(id, field);
      if (params.numCandidates === null) throw new PlanError(field, `${id} samples by itself`);
      if (token < 0 || token >= this.model.vocab_size) {
        throw new PlanError(field, `expected token ids below ${this.model.vocab_size}`);
      }
      tokens.push(token);
    }
  }

  /** Set or append block table entries. */
  update([id, group, index, block]) {
    const field = "block_updates";
    const { tables } = this.get(id, field);
    const { groups } = this.cache;
    const refuse = (problem) => {
      throw new PlanError(field, `entry ${index} of sequence ${id} ${problem}`);
    };
    if (!groups[group]) refuse(`is of group ${group}, expected 0 to ${groups.length - 1}`);
    if (isSource(groups[group])) refuse("is of a source, whose table never changes");
    const table = tables[group];
    const limit = isState(groups[group]) ? table.length - 1 : table.length;
    if (index < 0 || index > limit) refuse(`does not follow a table of ${table.length}`);
    if (tables.flat().includes(block)) refuse(`gives it block ${block} twice`);
    this.cache.hold(block, group, field);
    if (index < table.length) this.cache.release(table[index]);
    table[index] = block;
  }

  #checkTokens(tokens, field) {
    if (tokens.some((token) => token < 0 || token >= this.model.vocab_size)) {
      throw new PlanError(field, `expected token ids below ${this.model.vocab_size}`);
    }
  }
}
