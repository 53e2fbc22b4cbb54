// Vectors: a token's hidden state is what its logits are computed from, here the logits themselves.

import { PlanError } from "./errors.js";

const LAST = "POOLING_TYPE_LAST";
const MEAN = "POOLING_TYPE_MEAN";
const CLS = "POOLING_TYPE_CLS";
export const ALL = "POOLING_TYPE_ALL";
export const TYPES = [LAST, MEAN, CLS, ALL];

/** How a new sequence is pooled; null if it generates tokens. */
export function readPooling(message, size, path) {
  const { pooling } = message;
  if (!pooling) return null;
  if (!TYPES.includes(pooling.type)) {
    throw new PlanError(`${path}.pooling.type`, `expected a type of pooling, got ${pooling.type}`);
  }
  if (pooling.head !== "POOLING_HEAD_UNSPECIFIED") {
    throw new PlanError(`${path}.pooling.head`, "expected none, as the model has no labels");
  }
  if (pooling.dimensions > size) {
    throw new PlanError(`${path}.pooling.dimensions`, `expected 0 to ${size}`);
  }
  if (message.num_computed_tokens > 0 && pooling.type !== LAST) {
    throw new PlanError(`${path}.num_computed_tokens`, `expected 0 with ${pooling.type}`);
  }
  return { ...pooling, size, state: null, ofRow: [] };
}

/** Take in the hidden state of a sequence's next token. */
export function accumulate(pooling, state, position) {
  const { type, state: before } = pooling;
  if (type === ALL) pooling.ofRow.push(state);
  if (type === LAST || before === null) pooling.state = state;
  else if (type === MEAN) {
    pooling.state = before.map((value, index) => (value * position + state[index]) / (position + 1));
  }
}

/** The vector once all tokens are computed, or those of the tokens since the last call. */
export function pooled({ type, state, ofRow, dimensions, normalize, size }) {
  const states = type === ALL ? ofRow.splice(0) : [state];
  return states.flatMap((full) => {
    const vector = full.slice(0, dimensions || size);
    const norm = normalize ? Math.hypot(...vector) : 1;
    return vector.map((value) => value / norm);
  });
}
