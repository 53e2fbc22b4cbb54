"""Beam search: the sequences that hold a request's beams, and how they are scheduled.

A request has one sequence per beam for its whole life. Each beam that continues is *held* by one of
them; the others are idle. When a step's candidates are in, the search chooses (`beam_search.py`): a
beam that continues in one way keeps its sequence; if it continues in several, all but the first
fork from it, into idle sequences. So the worker gets tokens to append, forks, and sequences to
forget. Nothing is reported to the frontend before the search has ended.

The beams of a group advance in lockstep: all compute their last tokens in one step, and none before
all candidates of the previous step have arrived and the search has chosen. So a group is never
pipelined with itself; other requests are not affected. Its sequences are in the running set's lists
like any others, so that preemption treats them equally, but always as a whole.

A preempted group is admitted again as a whole, too. Its beams have a common beginning; each is
computed only from where it differs from the beams before it, once these are computed. So the group
needs no more memory than before, with or without a prefix cache.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.beam_search import MAX_LENGTH_PENALTY, BeamParams, BeamSearch, Path
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.prefix_hit import JointStart
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler_stats import ModelTotals
from scheduler_service.core.scheduling.batch import Batch, make_fork
from scheduler_service.core.scheduling.departures import Departures, finish_choice
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.resources import Entrants, acquire_all, fit_all
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.scheduling.strategy import AddRows, StrategyScheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus, Strategy
from scheduler_service.core.step_plan import RowCandidates, RowLogprobs, RowOutput, RowVectors
from scheduler_service.errors import InvalidArgument, NoCandidates


def check_beam_search(request: Request, params: BeamParams, config: SchedulerConfig) -> None:
    """Raise InvalidArgument for a search that is invalid for every model."""
    if not request.work.num_choices <= params.width <= config.max_num_seqs:
        raise InvalidArgument(
            "beam_search.width",
            f"must be {request.work.num_choices} to {config.max_num_seqs}, from the number of "
            "choices to the scheduler's max_num_seqs",
        )
    if not -MAX_LENGTH_PENALTY <= params.length_penalty <= MAX_LENGTH_PENALTY:
        raise InvalidArgument(
            "beam_search.length_penalty", f"must be within {MAX_LENGTH_PENALTY} of 0"
        )
    if request.work.generated:
        raise InvalidArgument(
            "resume", "must hold nothing with beam_search, which restarts from the prompt"
        )


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam that continued by one token, which is still to be sent to the worker."""

    seq: Sequence
    token: int
    parent: Sequence | None
    """The sequence that it forks from; None: it continues in place."""


class Beams(Strategy):
    """The sequences that hold a request's beams, the best first.

    The state of one step (`source_of`, `continuations`, candidates) is dropped when the group
    leaves the batch: all its tokens are known by then, and the candidates are recomputed.
    """

    is_lockstep = True
    streams = False
    output = RowOutput.CANDIDATES

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.held: list[Sequence] = []
        """The sequences of the beams that continue, in the search's order."""
        self.continuations: list[Continuation] = []
        """The changes that the next plan sends to the worker; forks come last."""
        self.source_of: dict[Sequence, Sequence] = {}
        """While the group is recomputed: by sequence, the one that computes its first tokens."""
        self.num_prefilling = 0
        """Held sequences that have not been computed up to their last token."""
        self._candidates: dict[Sequence, RowCandidates] = {}

    def start(self, sequences: list[Sequence]) -> None:
        """Begin with the first sequence, which holds the prompt."""
        self.held = sequences[:1]

    def active(self, seq_group: SequenceGroup) -> Iterable[Sequence]:
        """The sequences that hold beams."""
        del seq_group
        return self.held

    @property
    def is_due(self) -> bool:
        """Whether all beams may compute their last tokens."""
        return self.num_prefilling == 0 and not any(seq.num_in_flight for seq in self.held)

    def has_candidates(self, seq: Sequence) -> bool:
        """Whether a step that computed all of a sequence's tokens has its result."""
        return seq in self._candidates

    def collect(self, seq: Sequence, candidates: RowCandidates) -> bool:
        """Add the candidates of one beam; returns whether all beams have theirs."""
        self._candidates[seq] = candidates
        return len(self._candidates) == len(self.held)

    def leave_batch(self) -> None:
        """Forget the step in progress: the group leaves the batch."""
        self.continuations = []
        self.source_of = {}
        self.num_prefilling = 0
        self._candidates = {}

    def advance(self) -> list[tuple[Sequence, int]]:
        """Advance the search; return the parent sequence and the next token of each beam that
        continues, in order. Unless the search is done, `hold` then sets the beams' sequences."""
        holders = self.held
        if not self.search.has_begun:
            holders = holders * len(self.search.beams)  # all are the prompt alone
        self.search.advance([self._candidates[seq] for seq in holders])
        self._candidates = {}
        beams = [(holders[beam.parent], beam.path) for beam in self.search.beams]
        return [(seq, path.token) for seq, path in beams if path is not None]

    def hold(self, continuations: list[Continuation]) -> None:
        """Set the sequences that hold the beams that continue, in order."""
        self.held = [continuation.seq for continuation in continuations]
        self.continuations = sorted(
            continuations, key=lambda beam: (beam.parent is not None, beam.seq.order)
        )


@dataclass(slots=True, eq=False)
class BeamScheduler(StrategyScheduler):
    """Admits beam groups, plans their rows, and advances their searches."""

    running: RunningSet
    pipeline: Pipeline
    preemption: Preemption
    departures: Departures
    totals: ModelTotals

    def place(self, seq_group: SequenceGroup, now_us: int) -> None:
        """End a search that has as many tokens as it can have here."""
        search = _beams(seq_group).search
        search.limit(seq_group.sequences[0].max_output_tokens)
        if search.is_done:
            self._finish(seq_group, now_us)

    # Admission.

    def admit(self, seq_group: SequenceGroup, batch: Batch, add_rows: AddRows) -> AllocStatus:
        """Admit all sequences of a group, with the memory of all its beams, or none of them."""
        beams = _beams(seq_group)
        if not self.running.places.has_room(len(seq_group.sequences)):
            return AllocStatus.LATER
        starts = self.running.cache.admission.start_jointly(beams.held, Sequence.num_common_tokens)
        if not batch.fits(starts[0].seq, starts[0].num_tokens):
            return AllocStatus.LATER
        entrants = Entrants(seq_group.sequences, starts)
        verdict = fit_all(self.running.resources, entrants)
        if verdict is AllocStatus.OK:
            idle = [seq for seq in seq_group.sequences if seq not in beams.held]
            beams.num_prefilling = len(starts)
            acquire_all(self.running.resources, entrants, batch)
            for start in starts:
                self._enter(start, idle if start is starts[0] else [], batch)
            add_rows(beams.held, batch)
        return verdict

    def _enter(self, start: JointStart[Sequence], idle: list[Sequence], batch: Batch) -> None:
        seq = start.seq
        seq.start_prefill(batch.step_id, start.num_tokens)
        if start.source is not None:
            _beams(seq.seq_group).source_of[seq] = start.source
        self.running.enter(seq, idle, batch.now_us)

    def max_row_tokens(self, seq: Sequence, batch: Batch) -> int:
        """A beam that is recomputed gets a row only once the tokens that it shares are computed."""
        source = _beams(seq.seq_group).source_of.get(seq)
        if source is not None and not _beams(seq.seq_group).has_candidates(source):
            return 0
        if self.running.is_unintroduced(seq):
            seq.prefill.rejoin(batch.step_id)
        return StrategyScheduler.max_row_tokens(self, seq, batch)

    # One token for each beam.

    def end_prefill(self, seq: Sequence, batch: Batch) -> None:
        """Report the beam's candidates; all beams continue together."""
        del batch
        _beams(seq.seq_group).num_prefilling -= 1
        seq.growth.advance()
        self.running.begin_decoding(seq)

    def reserve(self, seq: Sequence, batch: Batch) -> bool:
        """Add a row for each beam of the group if they are due, once in a batch."""
        seq_group = seq.seq_group
        if seq_group not in batch.lockstep_groups:
            batch.lockstep_groups.add(seq_group)
            if not self._extend(seq_group, batch):
                batch.exceeding.append(seq_group)
        return False

    def _extend(self, seq_group: SequenceGroup, batch: Batch) -> bool:
        """Add the rows; returns False if the beams can never continue here."""
        beams = _beams(seq_group)
        if not beams.is_due:
            return True
        held = beams.held
        if held[0].growth.length > seq_group.placement.num_cache_tokens:
            return False
        while not self.running.cache.tables.can_reserve_all(held):
            if not self.preemption.make_room(seq_group, batch):
                return False
            if seq_group.num_running == 0:
                return True
        self._add_rows(beams, batch)
        return True

    def _add_rows(self, beams: Beams, batch: Batch) -> None:
        """Add the rows. Forks reserve first: of the beams that share their last memory, the last to
        reserve keeps it and the others copy it, and a fork's table is sent as a whole anyway."""
        continued = {child.seq: child for child in beams.continuations}
        forks = [child for child in beams.continuations if child.parent is not None]
        for child in forks:
            self._reserve(child.seq, batch, is_fork=True)
        forked = {child.seq for child in forks}
        for seq in sorted((s for s in beams.held if s not in forked), key=lambda s: s.order):
            self._reserve(seq, batch, is_fork=False)
            if seq in continued:
                batch.append_token(seq.seq_id, continued[seq].token)
            batch.add_beam(seq)
            seq.growth.advance()
        for child in forks:
            assert child.parent is not None
            tables = self.running.cache.tables.of(child.seq)
            batch.add_new(make_fork(child.seq, child.parent, [child.token], tables))
            self.running.mark_introduced(child.seq)
            batch.add_beam(child.seq)
            child.seq.growth.advance()
        beams.continuations = []

    def _reserve(self, seq: Sequence, batch: Batch, *, is_fork: bool) -> None:
        """Make a beam's last token writable. The table of a fork is sent later, as a whole."""
        cache = self.running.cache
        cache.released.slide(seq, seq.growth.next_position)
        updates = cache.tables.reserve(seq, seq.growth.length)
        if is_fork:
            batch.copy_shared(updates)
        else:
            batch.update_tables(seq.seq_id, updates)
        cache.prefixes.offer(seq, seq.num_confirmed)

    # Results.

    def receive(
        self, seq: Sequence, step_id: int, value: RowCandidates | RowVectors, now_us: int
    ) -> None:
        """Collect the candidates for a beam's next token; with those of all beams, continue the
        search. Results of steps from before a preemption are ignored."""
        if seq.status is not SequenceStatus.RUNNING or step_id < seq.prefill.first_step_id:
            return
        assert isinstance(value, RowCandidates)
        beams = _beams(seq.seq_group)
        if not beams.collect(seq, value):
            return
        continuations = beams.advance()
        if beams.search.is_done:
            self._finish(seq.seq_group, now_us)
        else:
            self._continue(beams, continuations)

    def _finish(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Deliver what the search has found, and end its group."""
        num_tokens = _deliver(seq_group)
        if num_tokens is None:
            error = NoCandidates("the request's own constraints excluded every token")
            self.departures.fail_seq_group(seq_group, error, now_us)
        else:
            self.totals.num_generated_tokens += num_tokens
            self.departures.end_seq_group(seq_group, SequenceStatus.FINISHED_STOPPED, now_us)

    def _continue(self, beams: Beams, chosen: list[tuple[Sequence, int]]) -> None:
        """Give each new beam a sequence: its parent's, or an idle one."""
        continued = {parent for parent, _ in chosen}
        spare = [fork for seq in beams.held for fork in seq.release_forks()]
        for seq in beams.held:
            if seq not in continued:
                self.running.drop_beam(seq)
                seq.drop_beam()
                spare.append(seq)
        continuations: list[Continuation] = []
        in_place: set[Sequence] = set()
        for parent, token in chosen:
            if parent not in in_place:
                in_place.add(parent)
                continuations.append(Continuation(parent, token, None))
            else:
                child = spare.pop()
                self._fork(parent, child, token)
                continuations.append(Continuation(child, token, parent))
        for continuation in continuations:
            if continuation.parent is None:
                continuation.seq.append_sampled(continuation.token)
        beams.hold(continuations)
        beams.held[0].hold_forks(spare)

    def _fork(self, parent: Sequence, child: Sequence, token: int) -> None:
        """Make an idle sequence continue a copy of a beam with another token."""
        self.running.cache.tables.fork(parent, child)
        child.fork_beam(parent, token, self.pipeline.next_step_id)
        self.running.add_beam(child)


def _beams(seq_group: SequenceGroup) -> Beams:
    assert isinstance(seq_group.strategy, Beams)
    return seq_group.strategy


def _deliver(seq_group: SequenceGroup) -> int | None:
    """Send all tokens of the best sequences to the frontend; return their number.

    Returns None, and sends nothing, if the search found fewer sequences than requested because
    the request's own constraints left no candidates.
    """
    best = _beams(seq_group).search.finished[: seq_group.request.work.num_choices]
    if len(best) < seq_group.request.work.num_choices:
        return None
    return sum(
        _deliver_choice(seq_group, seq_group.request.handle + index, finished.path)
        for index, finished in enumerate(best)
    )


def _deliver_choice(seq_group: SequenceGroup, handle: int, path: Path) -> int:
    outbox, request = seq_group.frontend.outbox, seq_group.request
    assert request.work.beam_search is not None
    steps = path.steps()
    outbox.token_handles += [handle] * len(steps)
    outbox.token_ids += [step.token for step in steps]
    if (num_top := request.work.beam_search.num_logprobs) is not None:
        outbox.logprobs += [(handle, _beam_logprobs(step, num_top)) for step in steps]
    is_stopped = path.token in request.work.stop_token_ids
    finish_choice(seq_group.frontend, handle, path.token if is_stopped else None)
    return len(steps)


def _beam_logprobs(step: Path, num_top: int) -> RowLogprobs:
    """The log probability with which a token was scored, and those of the top candidates."""
    assert step.row is not None
    token_ids = [step.token, *step.row.token_ids[:num_top]]
    logprobs = [step.logprob, *step.row.logprobs[:num_top]]
    return RowLogprobs(
        token_ids=struct.pack(f"<{len(token_ids)}i", *token_ids),
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        sampled_rank=step.place + 1,
    )
