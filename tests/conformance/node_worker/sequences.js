// What the worker remembers of sequences, and what plans may say of them.

import { column } from "./columns.js";
import { PlanError } from "./errors.js";
import { readPooling } from "./pooling.js";
import { readParams } from "./sampler.js";

/** The blocks of a model with one cache group, which keeps all tokens. */
function readTable(tables, path) {
  if (tables.length === 0) return [];
  const [{ group, first_index: first, block_ids: blocks }] = tables;
  if (tables.length > 1 || group !== 0 || first !== 0) {
    throw new PlanError(path, "expected one table, of group 0 and from index 0 on");
  }
  return column(blocks, `${path}[0].block_ids`);
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
      this.get(id, "forget_seq_ids");
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
    const tokens = this.#tokens(message.token_ids, `${path}.token_ids`);
    const sequence = {
      id,
      choiceIndex: message.choice_index,
      params: message.pooling
        ? NO_PARAMS
        : readParams(message.sampling, this.model.vocab_size, `${path}.sampling`),
      pooling: readPooling(message, this.model.vector_size, path),
      promptLogprobsStart: message.prompt_logprobs_start,
      blocks: readTable(message.tables, `${path}.tables`),
      parent: null,
      failure: null,
      lastLogits: null,
    };
    sequence.blocks.forEach((block) => this.#checkBlock(block, `${path}.tables[0].block_ids`));
    if (message._parent_seq_id) this.#inherit(sequence, message, tokens, path);
    else this.#begin(sequence, message, tokens, path);
    if (sequence.tokens.length > this.model.max_model_len) {
      throw new PlanError(`${path}.token_ids`, `expected at most ${this.model.max_model_len}`);
    }
    this.#known.set(id, sequence);
    return sequence;
  }

  #begin(sequence, message, tokens, path) {
    const { num_prompt_tokens: numPrompt, num_computed_tokens: numComputed } = message;
    if (numPrompt < 1 || numPrompt > tokens.length) {
      throw new PlanError(`${path}.num_prompt_tokens`, `expected 1 to ${tokens.length}`);
    }
    const room = Math.min(tokens.length, sequence.blocks.length * this.cache.blockSize);
    if (numComputed > room) {
      throw new PlanError(`${path}.num_computed_tokens`, `expected at most ${room}`);
    }
    Object.assign(sequence, { tokens, numPrompt, numComputed });
  }

  #inherit(sequence, message, tokens, path) {
    const parent = this.get(message.parent_seq_id, `${path}.parent_seq_id`);
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
    const { blocks } = this.get(id, "block_updates");
    if (group !== 0) throw new PlanError("block_updates", `expected group 0, got ${group}`);
    this.#checkBlock(block, "block_updates");
    if (index < 0 || index > blocks.length) {
      throw new PlanError("block_updates", `entry ${index} does not follow ${blocks.length}`);
    }
    blocks[index] = block;
  }

  #tokens(bytes, field) {
    const tokens = column(bytes, field);
    if (tokens.some((token) => token < 0 || token >= this.model.vocab_size)) {
      throw new PlanError(field, `expected token ids below ${this.model.vocab_size}`);
    }
    return tokens;
  }

  #checkBlock(block, field) {
    if (block < 0 || block >= this.cache.numDeviceBlocks) {
      throw new PlanError(field, `expected blocks below ${this.cache.numDeviceBlocks}`);
    }
  }
}
