// From logits to a token, in the order that sampling.proto gives.

import { readColumns } from "./columns.js";
import { PlanError } from "./errors.js";
import { draw } from "./philox.js";

/** A sequence's parameters, taken apart and checked once. */
export function readParams(message, vocabSize, path) {
  if (!(message?.temperature >= 0 && message.temperature < Infinity)) {
    throw new PlanError(`${path}.temperature`, "expected 0 or more");
  }
  if (!(message.top_p > 0 && message.top_p <= 1)) {
    throw new PlanError(`${path}.top_p`, "expected above 0 to 1");
  }
  if (!(message.repetition_penalty > 0)) {
    throw new PlanError(`${path}.repetition_penalty`, "expected above 0");
  }
  const checked = (ids, field) => {
    if (ids.some((id) => id < 0 || id >= vocabSize)) {
      throw new PlanError(field, `expected token ids below ${vocabSize}`);
    }
    return ids;
  };
  const { suppressed_token_ids: suppressed } = readColumns("SamplerParams", message, `${path}.`);
  const wordOf = (word) => readColumns("TokenSequence", word, `${path}.bad_words.`).token_ids;
  if (message._num_candidates && message.num_candidates < 1) {
    throw new PlanError(`${path}.num_candidates`, "expected at least 1");
  }
  return {
    ...message,
    numCandidates: message._num_candidates ? message.num_candidates : null,
    logprobs: message._logprobs ? message.logprobs : null,
    promptLogprobs: message._prompt_logprobs ? message.prompt_logprobs : null,
    biases: new Map(message.logit_bias.map(({ token_id, bias }) => [token_id, bias])),
    suppressed: checked(suppressed, `${path}.suppressed_token_ids`),
    badWords: message.bad_words.map((word) => checked(wordOf(word), `${path}.bad_words`)),
  };
}

/** The token after prompt and output; null if every token is excluded. */
export function choose(logits, params, choiceIndex, prompt, output) {
  const edited = applyEdits(logits, params, prompt, output);
  const top = Math.max(...edited);
  if (top === -Infinity) return null;
  if (params.temperature === 0) return edited.indexOf(top);
  const weights = edited.map((logit) => Math.exp((logit - top) / params.temperature));
  const cut = findCut(weights, params);
  const kept = weights.map((weight) => (weight >= cut ? weight : 0));
  return invert(kept, draw(params.seed, choiceIndex, output.length));
}

/** The most probable tokens after prompt and output, for the core to choose among. */
export function offer(logits, params, prompt, output) {
  const edited = applyEdits(logSoftmax(logits), params, prompt, output);
  const tokenIds = [...edited.keys()]
    .filter((token) => edited[token] > -Infinity)
    .sort((a, b) => edited[b] - edited[a] || a - b)
    .slice(0, params.numCandidates);
  return { tokenIds, logprobs: tokenIds.map((token) => edited[token]) };
}

function logSoftmax(logits) {
  const top = Math.max(...logits);
  const total = logits.reduce((sum, logit) => sum + Math.exp(logit - top), 0);
  return logits.map((logit) => logit - top - Math.log(total));
}

function applyEdits(logits, params, prompt, output) {
  const edited = logits.slice();
  for (const [token, bias] of params.biases) edited[token] += bias;
  const count = new Map();
  for (const token of output) count.set(token, (count.get(token) ?? 0) + 1);
  for (const token of new Set([...prompt, ...output])) {
    const penalty = params.repetition_penalty;
    edited[token] = edited[token] > 0 ? edited[token] / penalty : edited[token] * penalty;
  }
  for (const [token, times] of count) {
    edited[token] -= params.frequency_penalty * times + params.presence_penalty;
  }
  for (const token of banned(params, output)) edited[token] = -Infinity;
  return edited;
}

function banned(params, output) {
  const tokens = output.length < params.min_tokens ? [...params.suppressed] : [];
  for (const word of params.badWords) {
    const begin = word.slice(0, -1);
    const end = output.slice(output.length - begin.length);
    const isBegun = begin.length <= output.length && begin.every((id, at) => id === end[at]);
    if (isBegun) tokens.push(word.at(-1));
  }
  return tokens;
}

/** The smallest weight that min-p, top-k and top-p keep. */
function findCut(weights, { min_p, top_k, top_p }) {
  const falling = weights.slice().sort((left, right) => right - left);
  let cut = min_p * falling[0];
  if (top_k > 0) cut = Math.max(cut, falling[Math.min(top_k, falling.length) - 1]);
  if (top_p === 1) return cut;
  const left = falling.filter((weight) => weight >= cut);
  const goal = top_p * left.reduce((sum, weight) => sum + weight, 0);
  let mass = 0;
  for (const weight of left) {
    mass += weight;
    if (mass >= goal) return weight;
  }
  return left.at(-1);
}

/** The first token at which the cumulative weight exceeds the draw's share. */
function invert(weights, uniform) {
  const target = uniform * weights.reduce((sum, weight) => sum + weight, 0);
  let cumulative = 0;
  for (let token = 0; token < weights.length; token++) {
    cumulative += weights[token];
    if (cumulative > target) return token;
  }
  return weights.findLastIndex((weight) => weight > 0);
}

/** A token's log probability, those of the most probable ones, and its rank. */
export function logprobsOf(logits, token, width) {
  const logprobs = logSoftmax(logits);
  const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
  const tokenIds = [token, ...order.slice(0, width)];
  return {
    tokenIds,
    logprobs: tokenIds.map((id) => logprobs[id]),
    rank: 1 + logits.filter((logit) => logit > logits[token]).length,
  };
}
