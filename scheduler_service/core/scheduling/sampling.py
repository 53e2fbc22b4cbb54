"""Scheduling of requests whose choices are sampled, each token from the ones before it.

Choices without output share the first one's prefill, and fork from it. Then each of them advances
by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.scheduling.batch import Batch, make_fork
from scheduler_service.core.scheduling.departures import Departures
from scheduler_service.core.scheduling.preemption import Preemption, is_fetch_cheaper
from scheduler_service.core.scheduling.resources import Entrants, acquire_all, fit_all
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.scheduling.strategy import AddRows, StrategyScheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus, Strategy
from scheduler_service.core.throughput import StepRates


class Sampling(Strategy):
    """A sequence for each choice; a token that is sampled is delivered."""


@dataclass(slots=True, eq=False)
class SamplingScheduler(StrategyScheduler):
    """Schedules sampled choices."""

    running: RunningSet
    rates: StepRates
    preemption: Preemption
    departures: Departures

    def place(self, seq_group: SequenceGroup, now_us: int) -> None:
        """End those choices that already have the maximum of tokens here."""
        del now_us
        self.departures.end_full(seq_group)

    # Admission.

    def admit(self, seq_group: SequenceGroup, batch: Batch, add_rows: AddRows) -> AllocStatus:
        """Admit the sequences one after the other, as long as there is room."""
        max_forks = self.running.cache.admission.max_forks(
            seq_group.num_prompt_tokens, seq_group.num_source_tokens
        )
        for seq, forks in _starts(seq_group, max_forks):
            if batch.budget == 0:
                return AllocStatus.LATER
            verdict = self._admit_sequence(seq, forks, batch, add_rows)
            if verdict is not AllocStatus.OK:
                return verdict
        return AllocStatus.OK

    def _admit_sequence(
        self, seq: Sequence, forks: list[Sequence], batch: Batch, add_rows: AddRows
    ) -> AllocStatus:
        """Admit a sequence and those that will fork from it."""
        if any(other.num_in_flight for other in (seq, *forks)):
            return AllocStatus.LATER  # its tokens are sent again, so all must be known
        if not self.running.places.has_room(1 + len(forks)):
            return AllocStatus.LATER  # before its prefix is looked up, in every step under load
        hit = self.running.cache.prefixes.match(seq, is_fetched=self._is_fetched(batch))
        is_preempting = seq.seq_group.placement.is_preempting
        if not is_preempting and self.running.cache.prefixes.is_to_come(seq, hit):
            return AllocStatus.LATER
        if not batch.fits(seq, hit.num_tokens):
            return AllocStatus.LATER
        entrants = Entrants([seq, *forks], (seq, hit))
        verdict = fit_all(self.running.resources, entrants)
        if verdict is AllocStatus.OK:
            seq.start_prefill(batch.step_id, hit.num_tokens)
            awaits_swap_in = hit.num_moves > 0
            acquire_all(self.running.resources, entrants, batch)
            self.running.enter(seq, forks, batch.now_us, awaits_swap_in=awaits_swap_in)
            if not awaits_swap_in:
                add_rows([seq], batch)
        return verdict

    def _is_fetched(self, batch: Batch) -> Callable[[int, int], bool] | None:
        """Whether to swap in what the host has of a prompt. Not in a step with preemptions: what
        one of the step's copies reads may be free already, and must not be the target of a swap-in,
        which the worker does first."""
        return None if batch.has_preempted else partial(is_fetch_cheaper, self.rates)

    # Rows.

    def end_prefill(self, seq: Sequence, batch: Batch) -> None:
        """Decode from now on, as do the choices that fork from the prompt."""
        seq.growth.reserve(self.running.cache.tables.round_up(seq.growth.length))
        seq.growth.advance()
        self.running.begin_decoding(seq)
        for fork in seq.release_forks():
            self._fork(seq, fork, batch)

    def _fork(self, parent: Sequence, fork: Sequence, batch: Batch) -> None:
        """Make a choice sample from its parent's last logits and share its memory."""
        self.running.cache.tables.fork(parent, fork)
        fork.fork_from(parent, batch.step_id)
        # The first to write after the shared tokens must copy.
        parent.growth.reserve(fork.growth.length)
        fork.growth.reserve(fork.growth.length)
        fork.growth.advance()
        self.running.begin_decoding(fork)
        batch.add_new(make_fork(fork, parent, [], self.running.cache.tables.of(fork)))
        batch.add_prefill(fork, 0, True)

    def reserve(self, seq: Sequence, batch: Batch) -> bool:
        """Reserve memory for a sequence's last token, if necessary by preemption."""
        cache, length = self.running.cache, seq.growth.length
        if length >= seq.growth.max_length:
            return False  # its last token is in flight
        if length > seq.seq_group.placement.num_cache_tokens:
            if seq.num_in_flight == 0:
                batch.exceeding.append(seq.seq_group)
            return False  # its tokens in flight may end it
        while (updates := cache.advance(seq)) is None:
            if not self.preemption.make_room(seq.seq_group, batch):
                batch.exceeding.append(seq.seq_group)
                return False
            if seq.status is not SequenceStatus.RUNNING:
                return False
        batch.update_tables(seq.seq_id, updates)
        seq.growth.reserve(cache.tables.round_up(length))
        return True


def _starts(seq_group: SequenceGroup, max_forks: int) -> Iterator[tuple[Sequence, list[Sequence]]]:
    """The group's waiting sequences to prefill, each with the sequences that fork from it.

    Sequences without output share the first one's prefill, or that of one in every `max_forks` + 1;
    those with output differ from each other, and each is computed separately.
    """
    waiting = seq_group.waiting()
    fresh = [seq for seq in waiting if not seq.output_token_ids]
    for first in range(0, len(fresh), 1 + max_forks):
        yield fresh[first], fresh[first + 1 : first + 1 + max_forks]
    for seq in waiting:
        if seq.output_token_ids:
            yield seq, []
