"""A rank's part of a step: micro-batches, so that the stages of a pipeline work at the same time.

Every plan is divided into as many parts as there are stages, and each rank computes the parts one
after the other. While a stage computes one part, the stage before it computes the next; and since
a sequence decodes in the same part of every plan, the first stage begins with a part of the next
plan as soon as that part's tokens are known:

    stage 0    plan 1 a   plan 1 b   plan 2 a   plan 2 b   plan 3 a
    stage 1               plan 1 a   plan 1 b   plan 2 a   plan 2 b

That needs two plans at the worker, which the core's pipelining provides.

The slowest part sets the pace, so parts are even in tokens. A prompt's tokens are all known, and
may be cut into pieces that follow one another in the order of the parts; the last of them samples.
A piece beyond the sequence's own part has a price: that part of the next plan, in which it decodes
for the first time, waits for the token. So what samples fills its own part first, then those
before it, and only then those after it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.distributed.communicator import Communicator
from worker_service.errors import GroupBroken, InvalidPlan
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.plan import RowErrorReason, StepPlan, StepResult
from worker_service.runner.batch import StepRows
from worker_service.runner.model_runner import ForwardPass, LastLogits, ModelRunner, StepOutcome
from worker_service.runner.pending_tokens import RankPendingTokens, encode_outcome
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN
from worker_service.structured.masks import ConstrainedRow, MaskedRows

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


LEAST_TOKENS = 16
"""The least piece that is cut off: about so much longer may a part be than the mean."""


def micro_batches(plan: StepPlan, table: SequenceTable) -> Iterator[tuple[Int64Array, StepPlan]]:
    """(rows of the plan, a plan of these rows) of each part that has rows; a row that was cut is in
    several, and samples in the last of them.

    The same on every rank: rows, and with them parts, follow from the plans alone. A fork that
    samples from its parent's logits is where its parent samples. Raises InvalidPlan if a sequence
    has two rows.
    """
    if table.num_parts == 1:
        yield np.arange(len(plan.seq_ids)), plan
        return
    shares, ends = _divide(plan, table)
    for part in range(table.num_parts):
        ends_here = ends == part
        rows = np.flatnonzero((shares[part] > 0) | ends_here)
        if len(rows):
            yield (
                rows,
                replace(
                    plan,
                    seq_ids=plan.seq_ids[rows],
                    num_tokens=shares[part, rows],
                    sample=(plan.sample & ends_here)[rows],
                ),
            )


def _divide(plan: StepPlan, table: SequenceTable) -> tuple[Int32Array, Int64Array]:
    """[num_parts, num_rows]: each row's tokens in each part; [num_rows]: the part it ends in."""
    row_ids = table.row_ids(plan.seq_ids, "seq_ids")
    if len(np.unique(row_ids)) != len(row_ids):
        raise InvalidPlan("seq_ids", "a sequence has two rows")
    ends = table.parts(row_ids)
    shares = np.zeros((table.num_parts, len(row_ids)), np.int32)
    is_long = plan.num_tokens > LEAST_TOKENS
    short = np.flatnonzero(~is_long)
    shares[ends[short], short] = plan.num_tokens[short]
    room = -(-int(plan.num_tokens.sum()) // table.num_parts) - shares.sum(axis=1)
    # Those that sample first: they have wishes.
    for row in sorted(np.flatnonzero(is_long).tolist(), key=lambda row: not plan.sample[row]):
        order = _order(int(ends[row]), table.num_parts, samples=bool(plan.sample[row]))
        shares[:, row] = _pieces(int(plan.num_tokens[row]), room, order)
        room -= shares[:, row]
        ends[row] = np.flatnonzero(shares[:, row])[-1]
    for row in np.flatnonzero(plan.num_tokens == 0).tolist():
        ends[row] = _end_of_parent(plan, row, ends)
    return shares, ends


def _order(own: int, num_parts: int, *, samples: bool) -> Sequence[int]:
    """In which parts a row would rather be."""
    if not samples:
        return range(num_parts)
    return [*range(own, -1, -1), *range(own + 1, num_parts)]


def _pieces(num_tokens: int, room: Int64Array, order: Sequence[int]) -> Int64Array:
    """How many of a row's tokens each part takes, none much more than it has room for."""
    pieces, left = np.zeros_like(room), num_tokens
    for part in order:
        if left <= room[part] + LEAST_TOKENS:
            pieces[part] = left
            return pieces
        if room[part] > 0:
            pieces[part] = max(int(room[part]), LEAST_TOKENS)
            left -= int(pieces[part])
    pieces[np.argmax(room - pieces)] += left
    return pieces


def _end_of_parent(plan: StepPlan, row: int, ends: Int64Array) -> int:
    """A row that names no parent of this plan stays: the runner reports what is wrong with it."""
    seq_id = int(plan.seq_ids[row])
    parent = next((new.parent_seq_id for new in plan.new_sequences if new.seq_id == seq_id), None)
    found = [] if parent is None else np.flatnonzero(plan.seq_ids == parent).tolist()
    return int(ends[found[0]] if found else ends[row])


class RankRunner(ModelRunner):
    """A model runner whose model is one rank's share, for one epoch.

    Every rank executes the same plans and keeps the same state of the sequences. Only the sampling
    rank's results hold their tokens; the others' are empty.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        communicator: Communicator,
        grammars: "Grammars | None" = None,
    ) -> None:
        """Raises GroupBroken unless `communicator` has joined the other ranks."""
        self._communicator = communicator
        self._layout = communicator.layout
        super().__init__(model, cache, block_size, grammars)
        self._joined_pending: RankPendingTokens | None = RankPendingTokens(
            communicator.joined, self._sequences
        )

    @property
    def _num_parts(self) -> int:
        """As many as there are stages."""
        return self._layout.pipeline_parallel_size

    def reset(self) -> None:
        """Forget all sequences and part with the other ranks: the epoch is over."""
        super().reset()
        self._joined_pending = None
        self._communicator.leave()

    def execute(self, plan: StepPlan) -> StepResult:
        """Do this rank's part. Raises InvalidPlan as every rank does, or GroupBroken."""
        result = super().execute(plan)
        if self._layout.samples:
            return result
        return replace(result, token_ids=result.token_ids[:0])

    def _forget(self, plan: StepPlan) -> None:
        self._pending.forget(self._sequences.row_ids(plan.forget_seq_ids, "forget_seq_ids"))
        super()._forget(plan)

    def _admit(self, plan: StepPlan) -> None:
        """What forks take over, and what chosen tokens follow, has to be known by then."""
        table = self._sequences
        seq_ids = [new.parent_seq_id for new in plan.new_sequences if new.parent_seq_id is not None]
        seq_ids += plan.appended_tokens[:, 0].tolist()
        row_ids = [table.row_id(seq_id) for seq_id in seq_ids if seq_id in table]
        self._pending.resolve(np.array(row_ids, np.int64))
        super()._admit(plan)

    def _compute(self, plan: StepPlan) -> StepOutcome:
        whole = StepOutcome(
            tokens=np.full(len(plan.seq_ids), NO_TOKEN, np.int64),
            logprobs={},
            prompt_logprobs={},
            candidates={},
            errors={},
        )
        for rows, part in micro_batches(plan, self._sequences):
            _merge(whole, rows, self._compute_part(part))
        self._communicator.joined.check()
        return whole

    def _compute_part(self, plan: StepPlan) -> StepOutcome:
        row_ids = self._sequences.row_ids(plan.seq_ids, "seq_ids")
        if self._layout.samples:
            outcome = super()._compute(plan)
            self._pending.broadcast(plan.step_id, encode_outcome(outcome.tokens, outcome.errors))
            return outcome
        self._pending.resolve(row_ids)
        outcome = super()._compute(plan)
        sampling = plan.sample.copy()
        sampling[list(outcome.errors)] = False
        self._pending.expect(plan.step_id, row_ids, sampling)
        nothing = np.zeros(0, np.int64)
        return StepOutcome(
            tokens=nothing,
            logprobs={},
            prompt_logprobs={},
            candidates={},
            errors={},
            forward_us=outcome.forward_us,
        )

    def _last_logits(
        self, sampling: Int64Array, rows: StepRows, forward: ForwardPass | None
    ) -> LastLogits | None:
        if not self._layout.is_last_stage:
            return None
        return super()._last_logits(sampling, rows, forward)

    def _add_prompt_logprobs(
        self, outcome: StepOutcome, rows: StepRows, forward: ForwardPass
    ) -> None:
        if self._layout.is_last_stage:
            super()._add_prompt_logprobs(outcome, rows, forward)

    def _constrained_rows(self, row_ids: Int64Array) -> list[ConstrainedRow]:
        """None where nothing is sampled: there tokens may still be unknown, too."""
        return super()._constrained_rows(row_ids) if self._layout.samples else []

    def _sample(
        self,
        outcome: StepOutcome,
        logits: LastLogits,
        sampling: Int64Array,
        rows: StepRows,
        masks: "Future[MaskedRows] | None",
    ) -> None:
        if self._layout.samples:
            super()._sample(outcome, logits, sampling, rows, masks)

    def _fail(self, outcome: StepOutcome, rows: StepRows, row: int, reason: RowErrorReason) -> None:
        """Which rows fail is the sampling rank's to say."""
        if self._layout.samples:
            super()._fail(outcome, rows, row, reason)

    @property
    def _pending(self) -> RankPendingTokens:
        if self._joined_pending is None:
            raise GroupBroken("this rank has not joined the others")
        return self._joined_pending


def _merge(whole: StepOutcome, rows: Int64Array, part: StepOutcome) -> None:
    """Add the outcome of some rows; ranks that do not sample have none. Of a row that was cut
    nothing but its prompt's log probabilities comes before its last piece, or its end."""
    if len(part.tokens):
        whole.tokens[rows] = part.tokens
    for field in ("logprobs", "candidates", "errors"):
        entries = getattr(part, field)
        getattr(whole, field).update((int(rows[row]), entry) for row, entry in entries.items())
    for index, entry in part.prompt_logprobs.items():
        row = int(rows[index])
        before = whole.prompt_logprobs.get(row)
        whole.prompt_logprobs[row] = entry if before is None else before.followed_by(entry)
    whole.forward_us += part.forward_us
