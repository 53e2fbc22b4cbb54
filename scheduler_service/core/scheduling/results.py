"""What follows from a step's result."""

from scheduler_service.core import delivery
from scheduler_service.core.beam_delivery import deliver_beams, without_beams
from scheduler_service.core.ending import Ending
from scheduler_service.core.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from scheduler_service.core.policies import Policy
from scheduler_service.core.scheduling.beams import BeamScheduling
from scheduler_service.core.scheduling.pipeline import InFlightStep, Pipeline
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.stats.request_timing import StepClock
from scheduler_service.core.stats.scheduler_stats import Totals
from scheduler_service.core.stats.throughput import StepRates
from scheduler_service.core.step_plan import RowError, StepResult
from scheduler_service.errors import GenerationFailed

_OUT = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)


class Receiving:
    """Takes results in: what was computed can be found, tokens are delivered, sequences end."""

    def __init__(
        self,
        policy: Policy,
        prefixes: PrefixCache | NoPrefixCache,
        pipeline: Pipeline,
        beams: BeamScheduling,
        ending: Ending,
        clock: StepClock,
        rates: StepRates,
        totals: Totals,
    ) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._pipeline = pipeline
        self._beams = beams
        self._ending = ending
        self._clock = clock
        self._rates = rates
        self._totals = totals

    def receive(self, result: StepResult, now_us: int) -> None:
        """Take in the oldest open step's result. Raises ResultMismatch, changing nothing."""
        step = self._pipeline.pop(result)
        waited_us = self._clock.advance(now_us, result)
        self._rates.note(step.work, result)
        for row, error in result.errors.items():
            self._fail_row(step.rows[row], error, now_us)
        self._note_prefills(step, now_us)
        _deliver_logprobs(step, result)
        sampled, token_ids = step.sampled, result.token_ids
        if step.lockstep_rows:
            self._receive_candidates(step, result, now_us)
            sampled, token_ids = without_beams(sampled, token_ids)
        num_accepted, finished = delivery.deliver_tokens(sampled, token_ids)
        self._count(step, num_accepted, waited_us)
        self._policy.note_tokens(step.sampled)
        for seq, status in finished:
            self._ending.end_sequence(seq, status, now_us)

    def finish_search(self, group: SequenceGroup, now_us: int) -> None:
        """Deliver what a beam search has found, and end its group."""
        num_tokens = deliver_beams(group)
        if num_tokens is None:
            message = "the request's own constraints excluded every token"
            error = GenerationFailed(message, reason="NO_CANDIDATES")
            self._ending.fail_group(group, error, now_us)
        else:
            self._totals.num_generated_tokens += num_tokens
            self._ending.end_group(group, SequenceStatus.FINISHED_STOPPED, now_us)

    def _fail_row(self, seq: Sequence, error: RowError, now_us: int) -> None:
        """End the group of a sequence whose row failed. What it computed may be the cause, and
        must not be found by others."""
        self._prefixes.forget(seq)
        failed = GenerationFailed(error.message, reason=error.reason)
        self._ending.fail_group(seq.group, failed, now_us)

    def _note_prefills(self, step: InFlightStep, now_us: int) -> None:
        """Tell how far prompts are computed, but for those that have left the batch since the step
        was planned: they may have begun again. If their next tokens come with this result they have
        not; what was computed is lost, but these count."""
        for seq, num_tokens, is_last in step.prefills:
            if seq.status is SequenceStatus.RUNNING and step.step_id >= seq.first_step_id:
                self._prefixes.note_prefill(seq, num_tokens, is_last)
                self._totals.note_prefill(seq, num_tokens, is_last, now_us)
            elif is_last and seq.status in _OUT and seq.num_in_flight:
                self._totals.note_prefill(seq, num_tokens, is_last, now_us)

    def _receive_candidates(self, step: InFlightStep, result: StepResult, now_us: int) -> None:
        for row in step.lockstep_rows:
            candidates, seq = result.candidates.get(row), step.rows[row]
            if candidates is not None and self._beams.receive(seq, step.step_id, candidates):
                self.finish_search(seq.group, now_us)

    def _count(self, step: InFlightStep, num_accepted: int, waited_us: int) -> None:
        """Decodes come in every step, so each has waited for its token since the step before. Those
        of beams are none: what they have is told at the end."""
        self._totals.num_generated_tokens += num_accepted
        first = [seq for seq, _, is_last in step.prefills if is_last and not seq.status.is_finished]
        num_decoded = num_accepted - sum(not seq.group.is_lockstep for seq in first)
        if num_decoded > 0:
            self._totals.inter_token.add(waited_us, num_decoded)


def _deliver_logprobs(step: InFlightStep, result: StepResult) -> None:
    for row, prompt_logprobs in result.prompt_logprobs.items():
        delivery.deliver_prompt_logprobs(step.rows[row].group, prompt_logprobs)
    for row, logprobs in result.logprobs.items():
        delivery.deliver_logprobs(step.rows[row], logprobs)
