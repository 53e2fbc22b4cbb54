// Vectors: a token's hidden state is what its logits are computed from, here the logits themselves.

import { PlanError } from "./errors.js";

const LAST = "POOLING_TYPE_LAST";
const MEAN = "POOLING_TYPE_MEAN";
const CLS = "POOLING_TYPE_CLS";

/** How a new sequence is pooled; null if it generates tokens. */
export function readPooling(message, size, path) {
  const { pooling } = message;
  if (!pooling) return null;
  if (![LAST, MEAN, CLS].includes(pooling.type)) {
    throw new PlanError(`${path}.pooling.type`, `expected a type of pooling, got ${pooling.type}`);
  }
  if (pooling.dimensions > size) {
    throw new PlanError(`${path}.pooling.dimensions`, `expected 0 to ${size}`);
  }
  if (message.num_computed_tokens > 0 && pooling.type !== LAST) {
    throw new PlanError(`${path}.num_computed_tokens`, `expected 0 with ${pooling.type}`);
  }
  return { ...pooling, size, state: null };
}

/** Take in the hidden state of a sequence's next token. */
export function accumulate(pooling, state, position) {
  const { type, state: before } = pooling;
  if (type === LAST || before === null) pooling.state = state;
  else if (type === MEAN) {
    pooling.state = before.map((value, index) => (value * position + state[index]) / (position + 1));
  }
}

/** The vector once all tokens are computed. */
export function pooled({ state, dimensions, normalize, size }) {
  const vector = state.slice(0, dimensions || size);
  const norm = normalize ? Math.hypot(...vector) : 1;
  return vector.map((value) => value / norm);
}
