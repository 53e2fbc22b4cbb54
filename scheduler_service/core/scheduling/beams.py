"""Scheduling of beam groups: their admission, their rows, and the results of their searches.

The beams of a group advance in lockstep: all compute their last tokens in one step, and none before
all candidates of the previous step have arrived and the search has chosen. So a group is never
pipelined with itself; other requests are not affected. Its sequences are in the running set's lists
like any others, so that preemption treats them equally, but always as a whole.

A preempted group is admitted again as a whole, too. Its beams have a common beginning; each is
computed only from where it differs from the beams before it, once these are computed. So the group
needs no more memory than before, with or without a prefix cache.
"""

import struct

from scheduler_service.core.beam_search import BeamGroup, Continuation, Path
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.manager import JointStart
from scheduler_service.core.request import ChoiceFinished
from scheduler_service.core.scheduling.batch import Batch, make_fork
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.worker_group_state import WorkerGroupState
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.step_plan import RowCandidates, RowLogprobs


class BeamScheduler:
    """Admits beam groups, plans their rows, and advances their searches. It has no state of its
    own: each part of the scheduler that meets beams has one."""

    def __init__(self, state: WorkerGroupState) -> None:
        self._config = state.config
        self._cache = state.cache
        self._running = state.running
        self._pipeline = state.pipeline

    # Admission.

    def admit(self, seq_group: SequenceGroup, batch: Batch) -> AllocStatus:
        """Admit all sequences of a group, with the memory of all its beams, or none of them."""
        beams = _beams(seq_group)
        if self._running.num_places + len(seq_group.sequences) > self._config.max_num_seqs:
            return AllocStatus.LATER
        starts = self._cache.start_jointly(beams.held, Sequence.num_common_tokens)
        num_missing = starts[0].seq.length - starts[0].num_tokens
        if not self._config.enable_chunked_prefill and num_missing > batch.budget:
            return AllocStatus.LATER
        verdict = self._cache.can_admit_jointly(starts)
        if verdict is AllocStatus.OK:
            idle = [seq for seq in seq_group.sequences if seq not in beams.held]
            beams.num_prefilling = len(starts)
            self._cache.admit_jointly(starts)
            for start in starts:
                self._enter(start, idle if start is starts[0] else [], batch.now_us)
        return verdict

    def _enter(self, start: JointStart[Sequence], idle: list[Sequence], now_us: int) -> None:
        seq = start.seq
        seq.start_prefill(self._pipeline.next_step_id, start.num_tokens)
        if start.source is not None:
            _beams(seq.seq_group).source_of[seq] = start.source
        self._running.enter(seq, idle, now_us)

    def may_prefill(self, seq: Sequence) -> bool:
        """Whether a beam that is recomputed may get a row: only once the tokens that it shares are
        computed."""
        source = _beams(seq.seq_group).source_of.get(seq)
        if source is not None and not _beams(seq.seq_group).has_candidates(source):
            return False
        if self._running.is_unknown(seq):
            seq.rejoin(self._pipeline.next_step_id)
        return True

    # One token for each beam.

    def add_rows(self, seq_group: SequenceGroup, batch: Batch, preemption: Preemption) -> bool:
        """Add a row for each beam if they are due; a second call for the same batch has no effect.
        Returns False if the beams can never continue here."""
        if seq_group in batch.beam_groups:
            return True
        batch.beam_groups.add(seq_group)
        beams = _beams(seq_group)
        if not beams.is_due:
            return True
        if beams.held[0].length > self._cache.num_tokens:
            return False
        held = beams.held
        while not self._cache.can_reserve_all(held):
            if not preemption.make_room(seq_group, batch):
                return False
            if seq_group.num_running == 0:
                return True
        self._add_rows(beams, batch)
        return True

    def _add_rows(self, beams: BeamGroup[Sequence], batch: Batch) -> None:
        """Add the rows. Forks reserve first: of the beams that share their last memory, the last to
        reserve keeps it and the others copy it, and a fork's table is sent as a whole anyway."""
        continued = {child.seq: child for child in beams.continuations}
        forks = [child for child in beams.continuations if child.parent is not None]
        tables = {child.seq: self._fork_table(child.seq, batch) for child in forks}
        forked = {child.seq for child in forks}
        for seq in sorted((s for s in beams.held if s not in forked), key=lambda s: s.order):
            self._reserve(seq, batch)
            if seq in continued:
                batch.append_token(seq.seq_id, continued[seq].token)
            batch.add_beam(seq)
            seq.extend()
        for child in forks:
            assert child.parent is not None
            batch.add_new(make_fork(child.seq, child.parent, [child.token], tables[child.seq]))
            self._running.mark_introduced(child.seq)
            batch.add_beam(child.seq)
            child.seq.extend()
        beams.continuations = []

    def _reserve(self, seq: Sequence, batch: Batch) -> None:
        update = self._cache.reserve(seq, seq.length)
        if update is not None:
            batch.update_table(seq.seq_id, update)
        self._cache.offer(seq, seq.num_confirmed)

    def _fork_table(self, seq: Sequence, batch: Batch) -> list[int]:
        update = self._cache.reserve(seq, seq.length)
        if update is not None:
            batch.copy_shared(update)
        self._cache.offer(seq, seq.num_confirmed)
        return self._cache.table(seq)

    # Results.

    def receive(self, seq: Sequence, step_id: int, candidates: RowCandidates) -> bool:
        """Receive the candidates for a beam's next token. Returns True if the search has ended.
        Results of steps from before a preemption are ignored."""
        if seq.status is not SequenceStatus.RUNNING or step_id < seq.first_step_id:
            return False
        beams = _beams(seq.seq_group)
        if not beams.collect(seq, candidates):
            return False
        continuations = beams.advance()
        if beams.search.is_done:
            return True
        self._continue(beams, continuations)
        return False

    def _continue(self, beams: BeamGroup[Sequence], chosen: list[tuple[Sequence, int]]) -> None:
        """Give each new beam a sequence: its parent's, or an idle one."""
        continued = {parent for parent, _ in chosen}
        spare = [fork for seq in beams.held for fork in seq.release_forks()]
        for seq in beams.held:
            if seq not in continued:
                self._drop(seq)
                spare.append(seq)
        continuations: list[Continuation[Sequence]] = []
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

    def _drop(self, seq: Sequence) -> None:
        """Drop a beam: free its memory and leave its sequence idle."""
        self._running.drop_beam(seq)
        seq.drop_beam()

    def _fork(self, parent: Sequence, child: Sequence, token: int) -> None:
        """Make an idle sequence continue a copy of a beam with another token."""
        self._cache.fork(parent, child)
        child.fork_beam(parent, token, self._pipeline.next_step_id)
        self._running.add_beam(child)


def _beams(seq_group: SequenceGroup) -> BeamGroup[Sequence]:
    assert seq_group.beams is not None
    return seq_group.beams


def deliver_beams(seq_group: SequenceGroup) -> int | None:
    """Send all tokens of the best sequences to the frontend; return their number.

    Returns None, and sends nothing, if the search found fewer sequences than requested because
    the request's own constraints left no candidates.
    """
    assert seq_group.beams is not None
    best = seq_group.beams.search.finished[: seq_group.request.num_choices]
    if len(best) < seq_group.request.num_choices:
        return None
    return sum(
        _deliver_choice(seq_group, seq_group.request.handle + index, finished.path)
        for index, finished in enumerate(best)
    )


def _deliver_choice(seq_group: SequenceGroup, handle: int, path: Path) -> int:
    outbox, request = seq_group.frontend.outbox, seq_group.request
    assert request.beam_search is not None
    steps = path.steps()
    outbox.token_handles += [handle] * len(steps)
    outbox.token_ids += [step.token for step in steps]
    if (num_top := request.beam_search.num_logprobs) is not None:
        outbox.logprobs += [(handle, _beam_logprobs(step, num_top)) for step in steps]
    is_stopped = path.token in request.stop_token_ids
    outbox.choices_finished.append(
        ChoiceFinished(
            handle=handle,
            reason="stop" if is_stopped else "length",
            stop_token_id=path.token if is_stopped else None,
        )
    )
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


def without_beams(
    sampled: list[Sequence], token_ids: list[int]
) -> tuple[list[Sequence], list[int]]:
    """The rows of sequences that are not beams."""
    pairs = zip(sampled, token_ids, strict=True)
    chosen = [(seq, token) for seq, token in pairs if not seq.seq_group.is_lockstep]
    return [seq for seq, _ in chosen], [token for _, token in chosen]
