// One step from plan to result.

import { SequenceMemory } from "./cache.js";
import { readColumns, withColumns } from "./columns.js";
import { MAX_DRAFTS, draft } from "./drafts.js";
import { PlanError } from "./errors.js";
import { isState, numSlots } from "./groups.js";
import { computeSlot, logitsAfter } from "./model.js";
import { ALL, accumulate, pooled } from "./pooling.js";
import { choose, logprobsOf, offer } from "./sampler.js";

const NO_TOKEN = -1;
const [TOKEN, CANDIDATES, VECTOR] = [1, 2, 3];

export const nowUs = () => Number(process.hrtime.bigint() / 1000n);

/** Does what a plan says; throws PlanError. */
export function executeStep(plan, sequences, cache, receivedUs) {
  const startedUs = nowUs();
  const columns = readColumns("StepPlan", plan, "", plan.seq_ids.length / 4);
  sequences.forget(columns.forget_seq_ids);
  cache.move(columns);
  const cacheDoneUs = nowUs();
  const newcomers = new Set(
    plan.new_sequences.map((message, index) => sequences.add(message, `new_sequences[${index}]`)),
  );
  sequences.append(columns.appended_tokens);
  columns.block_updates.forEach((update) => sequences.update(update));
  const rows = readRows(columns, sequences);
  const byId = new Map(rows.map((row) => [row.sequence.id, row]));
  for (const row of rows) checkRow(row, byId, newcomers, cache.groups);
  columns.saved_states.forEach((entry) => addSave(entry, byId, cache));
  for (const row of rows) checkSaves(row, cache.groups);
  const promptLogprobs = rows.flatMap((row) => compute(row, byId, cache));
  const forwardDoneUs = nowUs();
  const outcome = sampleAll(rows, plan.lookahead.length > 0);
  for (const { sequence } of rows) cache.releaseUnseen(sequence);
  const finishedUs = nowUs();
  return withColumns("StepResult", {
    epoch: plan.epoch,
    step_id: plan.step_id,
    ...outcome,
    prompt_logprobs: promptLogprobs,
    timings: {
      received_us: receivedUs,
      started_us: startedUs,
      finished_us: finishedUs,
      cache_ops_us: cacheDoneUs - startedUs,
      forward_us: forwardDoneUs - cacheDoneUs,
      sample_us: finishedUs - forwardDoneUs,
    },
  });
}

function readRows({ seq_ids: ids, num_tokens: numTokens, output, lookahead }, sequences) {
  if (new Set(ids).size !== ids.length) throw new PlanError("seq_ids", "a sequence has two rows");
  if (numTokens.some((number) => number < 0)) {
    throw new PlanError("num_tokens", "expected numbers of 0 or more");
  }
  if (output.some((kind) => kind > VECTOR)) {
    throw new PlanError("output", "expected bytes from 0 to 3");
  }
  return ids.map((id, index) => ({
    index,
    sequence: sequences.get(id, "seq_ids"),
    numTokens: numTokens[index],
    output: output[index],
    sample: output[index] === TOKEN || output[index] === CANDIDATES,
    lookahead: lookahead[index],
    drafts: [],
    computed: [],
    saves: new Map(), // by position, tables of the blocks that states are saved in
  }));
}

/** A row may compute tokens that exist, into blocks that exist, and samples from the last one. */
function checkRow(row, byId, newcomers, groups) {
  const { sequence, numTokens, lookahead } = row;
  if (lookahead > 0 && (!row.sample || numTokens === 0)) {
    throw new PlanError("lookahead", `row ${row.index} has drafts, but does not sample`);
  }
  if (sequence.failure) return;
  const known = sequence.tokens.length;
  if (numTokens === 0) {
    const parent = byId.get(sequence.parent);
    const isFork = newcomers.has(sequence) && row.sample && parent?.index < row.index;
    const end = isFork ? parent.sequence.numComputed + parent.numTokens : NO_TOKEN;
    if (!isFork || parent.numTokens === 0 || end !== known || end !== parent.sequence.tokens.length) {
      throw new PlanError("num_tokens", `row ${row.index} computes nothing and is no new fork`);
    }
    return;
  }
  const end = sequence.numComputed + numTokens;
  if (end > known) throw new PlanError("num_tokens", `row ${row.index}: ${end} tokens of ${known}`);
  const bringsAll = sequence.pooling?.type === ALL;
  if (groups.length === 0 && numTokens !== known) {
    throw new PlanError("num_tokens", `row ${row.index} computes a part of a prompt`);
  }
  if (row.output && end !== known && !bringsAll) {
    throw new PlanError("output", `row ${row.index} brings something before its last token`);
  }
  const expected = sequence.pooling ? VECTOR : sequence.params.numCandidates ? CANDIDATES : TOKEN;
  if ((row.output || bringsAll) && row.output !== expected) {
    throw new PlanError("output", `row ${row.index} has ${row.output}, expected 0 or ${expected}`);
  }
  const room = numSlots(groups, sequence.tables);
  if (end > room) throw new PlanError("num_tokens", `row ${row.index} lacks blocks`);
  if (lookahead > 0 && end + lookahead > room) {
    throw new PlanError("lookahead", `row ${row.index} lacks blocks for its drafts`);
  }
}

const SAVES = "saved_states";

/** A row saves states that it reaches. */
function addSave([id, group, position, block], byId, { groups, numDeviceBlocks }) {
  const row = byId.get(id);
  const index = row ? position - row.sequence.numComputed : 0;
  if (index < 1 || index > row.numTokens || row.lookahead > 0) {
    throw new PlanError(SAVES, `no row of sequence ${id} reaches ${position}`);
  }
  if (!groups[group] || !isState(groups[group])) {
    throw new PlanError(SAVES, `group ${group} has no states`);
  }
  if (block < 0 || block >= numDeviceBlocks) throw new PlanError(SAVES, `no block ${block}`);
  const tables = row.saves.get(position) ?? groups.map(() => []);
  tables[group].push(block);
  row.saves.set(position, tables);
}

function checkSaves({ saves }, groups) {
  for (const tables of saves.values()) {
    tables.forEach(({ length }, index) => {
      if (length > 0 && length !== groups[index].num_blocks) {
        throw new PlanError(SAVES, `${length} blocks of a state of ${groups[index].num_blocks}`);
      }
    });
  }
}

/** Write the row's slots; its last logits stay with the sequence. Returns prompt logprobs. */
function compute(row, byId, cache) {
  const { sequence, numTokens, index } = row;
  if (sequence.failure) return [];
  if (numTokens === 0) {
    const parent = byId.get(sequence.parent).sequence;
    sequence.numComputed = parent.numComputed;
    sequence.lastLogits = parent.lastLogits;
    return [];
  }
  const first = sequence.numComputed;
  const memory = (row.memory = new SequenceMemory(cache, sequence));
  const lines = [];
  for (let position = first; position < first + numTokens; position++) {
    const slot = computeSlot(sequence.tokens[position], position, memory, sequence.media.length);
    sequence.lastLogits = logitsAfter(slot);
    if (sequence.pooling) accumulate(sequence.pooling, sequence.lastLogits, position);
    const next = position + 1;
    if (row.saves.has(next)) memory.store(memory.states, next, row.saves.get(next));
    const isAsked = sequence.params.promptLogprobs !== null && next < sequence.numPrompt;
    if (isAsked && next >= sequence.promptLogprobsStart) {
      const width = sequence.params.promptLogprobs;
      lines.push(logprobsOf(sequence.lastLogits, sequence.tokens[next], width));
    }
  }
  sequence.numComputed += numTokens;
  memory.store(memory.states, sequence.numComputed);
  computeDrafts(row);
  if (lines.length === 0) return [];
  return [
    withColumns("RowPromptLogprobs", {
      row: index,
      start: Math.max(first + 1, sequence.promptLogprobsStart),
      width: lines[0].tokenIds.length,
      token_ids: lines.flatMap((line) => line.tokenIds),
      logprobs: lines.flatMap((line) => line.logprobs),
      ranks: lines.map((line) => line.rank),
    }),
  ];
}

/** Write the slots of the row's drafts after its own; states stay with the row. */
function computeDrafts(row) {
  const { sequence, lookahead, memory } = row;
  const reported = [sequence.params.promptLogprobs, sequence.params.numCandidates];
  if (lookahead === 0 || reported.some((each) => each !== null)) return;
  row.drafts = draft(sequence.tokens, Math.min(lookahead, MAX_DRAFTS));
  row.computed = row.drafts.map((token, index) => {
    const position = sequence.numComputed + index;
    const logits = logitsAfter(computeSlot(token, position, memory, sequence.media.length));
    return { logits, states: [...memory.states] };
  });
}

/** Sample after each draft that is right; returns these tokens, which the sequence has then. */
function keepDrafts(row, logprobs) {
  const { sequence, drafts, computed, memory } = row;
  const { params, numPrompt, choiceIndex } = sequence;
  const kept = [];
  for (const [index, guess] of drafts.entries()) {
    if (sequence.tokens.at(-1) !== guess) break;
    const [prompt, output] = [sequence.tokens.slice(0, numPrompt), sequence.tokens.slice(numPrompt)];
    const { logits, states } = computed[index];
    const token = choose(logits, params, choiceIndex, prompt, output);
    if (token === null) break;
    sequence.numComputed += 1;
    memory.store(states, sequence.numComputed);
    sequence.tokens.push(token);
    kept.push(token);
    reportLogprobs(row, logits, token, logprobs);
  }
  return kept;
}

/** Add a sampled token's entry, if the sequence asks for log probabilities. */
function reportLogprobs({ sequence, index }, logits, token, logprobs) {
  if (sequence.params.logprobs === null) return;
  const entry = logprobsOf(logits, token, sequence.params.logprobs);
  const { tokenIds: token_ids, logprobs: values, rank } = entry;
  const fields = { row: index, token_ids, logprobs: values, sampled_rank: rank };
  logprobs.push(withColumns("RowLogprobs", fields));
}

function sampleAll(rows, mayDraft) {
  const [tokens, logprobs, candidates, errors, counts, numDrafts] = [[], [], [], [], [], []];
  const vectors = rows
    .filter((row) => row.output === VECTOR)
    .map(({ index, sequence }) => ({ row: index, values: pooled(sequence.pooling) }))
    .map((vector) => withColumns("RowVector", vector));
  for (const row of rows) {
    if (row.sample) {
      counts.push(1);
      numDrafts.push(row.drafts.length);
    }
    const { sequence, index } = row;
    const { params, numPrompt } = sequence;
    if (row.sample && !sequence.failure) {
      const [prompt, output] = [sequence.tokens.slice(0, numPrompt), sequence.tokens.slice(numPrompt)];
      if (params.numCandidates !== null) {
        const offered = offer(sequence.lastLogits, params, prompt, output);
        const fields = { row: index, token_ids: offered.tokenIds, logprobs: offered.logprobs };
        candidates.push(withColumns("RowCandidates", fields));
        tokens.push(NO_TOKEN);
        continue;
      }
      const token = choose(sequence.lastLogits, params, sequence.choiceIndex, prompt, output);
      if (token !== null) {
        tokens.push(token);
        sequence.tokens.push(token);
        reportLogprobs(row, sequence.lastLogits, token, logprobs);
        const kept = keepDrafts(row, logprobs);
        tokens.push(...kept);
        counts[counts.length - 1] += kept.length;
        continue;
      }
      sequence.failure = "ROW_ERROR_REASON_NO_CANDIDATES";
    }
    if (sequence.failure) {
      errors.push({ row: index, reason: sequence.failure, message: "every token was excluded" });
      if (row.sample) tokens.push(NO_TOKEN);
    }
  }
  const ofDrafts = mayDraft ? { num_sampled: counts, num_drafts: numDrafts } : {};
  return { token_ids: tokens, ...ofDrafts, logprobs, candidates, vectors, errors };
}
