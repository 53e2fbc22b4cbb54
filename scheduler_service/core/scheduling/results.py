"""Processing of a step's result.

Computed tokens can be found in the prefix cache, tokens and log probabilities are delivered to the
frontends, and sequences finish.
"""

from dataclasses import dataclass

from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.policies import Policy
from scheduler_service.core.request import RequestFinished, RequestTimings
from scheduler_service.core.scheduler_stats import ModelTotals
from scheduler_service.core.scheduling.departures import Departures, finish_choice
from scheduler_service.core.scheduling.pipeline import InFlightStep, Pipeline
from scheduler_service.core.scheduling.strategies import StrategySchedulers
from scheduler_service.core.sequence import (
    Sequence,
    SequenceGroup,
    SequenceStatus,
    deliver_all,
)
from scheduler_service.core.step_plan import (
    RowCandidates,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    RowVectors,
    StepResult,
)
from scheduler_service.errors import GenerationFailed, NoCandidates, PagewireError

RUNNING = SequenceStatus.RUNNING
STOPPED = SequenceStatus.FINISHED_STOPPED
LENGTH_CAPPED = SequenceStatus.FINISHED_LENGTH_CAPPED
_ENTRY_BYTES = 4  # of an int32 or float32 column


def accept_drafts(
    step: InFlightStep, result: StepResult, totals: ModelTotals
) -> tuple[list[Sequence], list[int]]:
    """The sequences and tokens of a step with drafts, one entry per token, and without the tokens
    that follow a stop token. Sequences count only the drafts that were kept."""
    lookahead = step.lookahead or ()
    counts = result.num_sampled or [1] * len(step.sampled)
    num_drafts = result.num_drafts or [0] * len(step.sampled)
    sampled: list[Sequence] = []
    token_ids: list[int] = []
    accepted: list[int] = []
    end = total = 0
    for row, (seq, count) in enumerate(zip(step.sampled, counts, strict=True)):
        start, end = end, end + count
        tokens = result.token_ids[start:end]
        if count > 1 and not seq.stop_token_ids.isdisjoint(tokens):
            stop = next(at for at, token in enumerate(tokens) if token in seq.stop_token_ids)
            del tokens[stop + 1 :]
        sampled += [seq] * len(tokens)
        token_ids += tokens
        if row < len(lookahead) and lookahead[row]:
            seq.growth.retract_drafts(lookahead[row], count - 1)
            if seq.status is RUNNING or not seq.status.is_finished:
                num_accepted = len(tokens) - 1
                seq.seq_group.clock.timings.add_drafts(num_drafts[row], num_accepted)
                if number := num_drafts[row]:
                    total += number
                    accepted.append(num_accepted)
    totals.add_drafts(total, accepted)
    return sampled, token_ids


def without_candidates(
    sampled: list[Sequence], token_ids: list[int]
) -> tuple[list[Sequence], list[int]]:
    """The rows that have a token, of those that sample. The others have failed, or report
    candidates."""
    pairs = [pair for pair in zip(sampled, token_ids, strict=True) if pair[1] >= 0]
    return [seq for seq, _ in pairs], [token for _, token in pairs]


def finish_resumed(seq: Sequence) -> None:
    """End a choice that comes with all the tokens it can have."""
    output = seq.output_token_ids
    is_stopped = bool(output) and output[-1] in seq.stop_token_ids
    if is_stopped or len(output) >= seq.seq_group.request.work.max_tokens:
        finish_choice(seq.frontend, seq.handle, output[-1] if is_stopped else None)
        seq.seq_group.end(seq, STOPPED if is_stopped else LENGTH_CAPPED)


def finish_request(seq_group: SequenceGroup, timings: RequestTimings) -> None:
    """Report the end of a request to its frontend, unless the frontend cancelled it."""
    outbox = seq_group.frontend.outbox
    handle = seq_group.request.handle
    if seq_group.error is not None:
        outbox.requests_failed.append((handle, seq_group.error))
    elif not any(seq.status is SequenceStatus.FINISHED_ABORTED for seq in seq_group.sequences):
        finished = RequestFinished(
            handle=handle, cached_tokens=seq_group.num_cached_tokens, timings=timings
        )
        outbox.requests_finished.append(finished)


def deliver_logprobs(seq: Sequence, logprobs: RowLogprobs) -> None:
    """Pass on the log probabilities of a token that is about to be delivered."""
    if not seq.status.is_finished:
        seq.seq_group.frontend.outbox.logprobs.append((seq.handle, logprobs))


def first_token(logprobs: RowLogprobs) -> int:
    """The sampled token that the log probabilities are of."""
    return int.from_bytes(logprobs.token_ids[:_ENTRY_BYTES], "little")


def deliver_prompt_logprobs(seq_group: SequenceGroup, update: RowPromptLogprobs) -> None:
    """Pass on the part of a prompt's log probabilities that was not delivered yet.

    After a preemption, and where several choices are recomputed, a position may be reported
    again.
    """
    if seq_group.num_unfinished == 0:
        return
    num_reported = len(update.ranks) // _ENTRY_BYTES
    num_known = max(0, seq_group.prompt_logprobs_start - update.start)
    if num_known >= num_reported:
        return
    seq_group.prompt_logprobs_start = update.start + num_reported
    unreported = update if num_known == 0 else _without_first(update, num_known)
    seq_group.frontend.outbox.prompt_logprobs.append((seq_group.request.handle, unreported))


def _without_first(update: RowPromptLogprobs, num_tokens: int) -> RowPromptLogprobs:
    """The update without the entries of its first tokens."""
    matrix_start = num_tokens * update.width * _ENTRY_BYTES
    return RowPromptLogprobs(
        start=update.start + num_tokens,
        width=update.width,
        token_ids=update.token_ids[matrix_start:],
        logprobs=update.logprobs[matrix_start:],
        ranks=update.ranks[num_tokens * _ENTRY_BYTES :],
    )


_OUT = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)


@dataclass(slots=True, eq=False)
class ResultProcessor:
    """Records what a step computed, delivers its tokens and ends sequences."""

    cache: KVCacheManager
    pipeline: Pipeline
    departures: Departures
    strategies: StrategySchedulers
    policy: Policy
    totals: ModelTotals

    def receive(self, result: StepResult, now_us: int) -> list[Sequence]:
        """Process the result of the oldest step in flight; returns the sequences of its failed
        rows. Raises ResultMismatch and changes nothing if it is another step's."""
        step = self.pipeline.pop(result)
        waited_us = self.pipeline.clock.advance(now_us, result)
        self.pipeline.rates.observe(step.work, result)
        for row, error in result.errors.items():
            self._fail_row(step.rows[row], error, now_us)
        if result.errors:
            self.cache.records.add_withdrawal(step.step_id)
        self._record_prefills(step, now_us)
        self.cache.saved.confirm_plan(step.step_id)
        _deliver_logprobs(step, result)
        sampled, token_ids = step.sampled, result.token_ids
        if step.lookahead is not None:
            sampled, token_ids = accept_drafts(step, result, self.totals)
        served, num_drafts = sampled, len(sampled) - len(step.sampled)
        if result.candidates or result.vectors:
            self._receive_others(step, result, now_us)
            sampled, token_ids = without_candidates(sampled, token_ids)
        num_accepted, ended = deliver_all(sampled, token_ids)
        self._count(step, num_accepted, num_drafts, waited_us)
        self.policy.record_tokens(served)
        for seq, stop_token_id in ended:
            finish_choice(seq.frontend, seq.handle, stop_token_id)
            status = LENGTH_CAPPED if stop_token_id is None else STOPPED
            self.departures.end_sequence(seq, status, now_us)
        return [step.rows[row] for row in result.errors]

    def _fail_row(self, seq: Sequence, error: RowError, now_us: int) -> None:
        """End the group of a sequence whose row failed, unless the sequence has ended since the row
        was planned. What it computed may be the cause, and must not be found by others."""
        seq.prefill.confirm(is_complete=False)
        self.cache.prefixes.withdraw(seq)
        if not seq.status.is_finished:
            failed: PagewireError = GenerationFailed(error.message, reason=error.reason)
            if error.reason == NoCandidates.reason:
                failed = NoCandidates(error.message)
            self.departures.fail_seq_group(seq.seq_group, failed, now_us)

    def _record_prefills(self, step: InFlightStep, now_us: int) -> None:
        """Record how far prompts are computed, except for sequences that have left the batch since
        the step was planned and may have restarted. If their next tokens come with this result,
        they have not restarted: the computed KV is lost, but the tokens count."""
        for seq, num_tokens, is_last in step.prefills:
            if seq.status is SequenceStatus.RUNNING and step.step_id >= seq.prefill.first_step_id:
                seq.prefill.confirm(is_complete=is_last)
                self.cache.prefixes.offer(seq, num_tokens)
                self.totals.add_prefill(seq, num_tokens, is_last, now_us)
            elif is_last and seq.status in _OUT and seq.num_in_flight:
                self.totals.add_prefill(seq, num_tokens, is_last, now_us)

    def _receive_others(self, step: InFlightStep, result: StepResult, now_us: int) -> None:
        """Hand what rows bring other than tokens to their strategies."""
        for row in step.other_outputs:
            seq: Sequence = step.rows[row]
            value: RowCandidates | RowVectors | None = result.candidates.get(row)
            if (values := result.vectors.get(row)) is not None:
                first, number = step.vectors[row]
                is_last = not seq.seq_group.strategy.brings_all
                is_last |= first + number == seq.num_prompt_tokens
                value = RowVectors(first, values, is_last)
            if value is not None:
                self.strategies.of(seq.seq_group).receive(seq, step.step_id, value, now_us)

    def _count(
        self, step: InFlightStep, num_accepted: int, num_drafts: int, waited_us: int
    ) -> None:
        """Count tokens and their latencies. A decode has a row in every step, so each has waited
        for its token since the step before; drafts come with it. Strategies that report at the
        end are not counted."""
        self.totals.num_generated_tokens += num_accepted
        first = [seq for seq, _, is_last in step.prefills if is_last and not seq.status.is_finished]
        num_decoded = num_accepted - sum(seq.seq_group.strategy.streams for seq in first)
        num_drafts = min(num_drafts, num_decoded)
        self.totals.inter_token.add(waited_us, num_decoded - num_drafts)
        self.totals.inter_token.add(0, num_drafts)


def _deliver_logprobs(step: InFlightStep, result: StepResult) -> None:
    for row, prompt_logprobs in result.prompt_logprobs.items():
        deliver_prompt_logprobs(step.rows[row].seq_group, prompt_logprobs)
    for row, first in result.logprobs.items():
        seq = step.rows[row]
        for logprobs in (first, *result.kept_logprobs.get(row, ())):
            deliver_logprobs(seq, logprobs)
            if first_token(logprobs) in seq.stop_token_ids:
                break  # the tokens after it are dropped as well
