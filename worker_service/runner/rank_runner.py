"""A rank's part of a step, in time with the others."""

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from worker_service.array_types import Int64Array
from worker_service.errors import GroupBroken
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.parallel.agreement import Agreement, encode_outcome
from worker_service.parallel.micro_batches import micro_batches
from worker_service.parallel.ranks import Ranks
from worker_service.plan import RowErrorReason, StepPlan, StepResult
from worker_service.runner.batch import StepRows
from worker_service.runner.model_runner import ForwardPass, LastLogits, ModelRunner, Outcome
from worker_service.sampling.sampler import NO_TOKEN
from worker_service.structured.masks import ConstrainedRow, MaskedRows

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


class RankRunner(ModelRunner):
    """A model runner whose model is one rank's share, for one epoch.

    Every rank executes the same plans and keeps the same state of the sequences. Only the sampling
    rank's results tell what came of them; the others' are empty.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        ranks: Ranks,
        grammars: "Grammars | None" = None,
    ) -> None:
        """Raises GroupBroken unless `ranks` have joined."""
        self._ranks = ranks
        self._layout = ranks.layout
        super().__init__(model, cache, block_size, grammars)
        self._agreement: Agreement | None = Agreement(ranks.joined, self._sequences)

    @property
    def _num_parts(self) -> int:
        """As many as there are stages."""
        return self._layout.pipeline_parallel_size

    def reset(self) -> None:
        """Forget all sequences and part with the other ranks: the epoch is over."""
        super().reset()
        self._agreement = None
        self._ranks.leave()

    def execute(self, plan: StepPlan) -> StepResult:
        """Do this rank's part. Raises InvalidPlan as every rank does, or GroupBroken."""
        result = super().execute(plan)
        if self._layout.samples:
            return result
        return replace(result, token_ids=result.token_ids[:0])

    def _forget(self, plan: StepPlan) -> None:
        self._agreeing.forget(self._sequences.slots(plan.forget_seq_ids, "forget_seq_ids"))
        super()._forget(plan)

    def _take_in(self, plan: StepPlan) -> None:
        """What forks take over, and what chosen tokens follow, has to be known by then."""
        table = self._sequences
        seq_ids = [new.parent_seq_id for new in plan.new_sequences if new.parent_seq_id is not None]
        seq_ids += plan.appended_tokens[:, 0].tolist()
        slots = [table.slot(seq_id) for seq_id in seq_ids if seq_id in table]
        self._agreeing.know(np.array(slots, np.int64))
        super()._take_in(plan)

    def _compute(self, plan: StepPlan) -> Outcome:
        whole = Outcome(
            tokens=np.full(len(plan.seq_ids), NO_TOKEN, np.int64),
            logprobs={},
            prompt_logprobs={},
            candidates={},
            errors={},
        )
        for rows, part in micro_batches(plan, self._sequences):
            _merge(whole, rows, self._compute_part(part))
        self._ranks.joined.check()
        return whole

    def _compute_part(self, plan: StepPlan) -> Outcome:
        slots = self._sequences.slots(plan.seq_ids, "seq_ids")
        if self._layout.samples:
            outcome = super()._compute(plan)
            self._agreeing.tell(plan.step_id, encode_outcome(outcome.tokens, outcome.errors))
            return outcome
        self._agreeing.know(slots)
        outcome = super()._compute(plan)
        sampling = plan.sample.copy()
        sampling[list(outcome.errors)] = False
        self._agreeing.expect(plan.step_id, slots, sampling)
        nothing = np.zeros(0, np.int64)
        return Outcome(
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

    def _add_prompt_logprobs(self, outcome: Outcome, rows: StepRows, forward: ForwardPass) -> None:
        if self._layout.is_last_stage:
            super()._add_prompt_logprobs(outcome, rows, forward)

    def _constrained_rows(self, slots: Int64Array) -> list[ConstrainedRow]:
        """None where nothing is sampled: there tokens may still be unknown, too."""
        return super()._constrained_rows(slots) if self._layout.samples else []

    def _sample(
        self,
        outcome: Outcome,
        logits: LastLogits,
        sampling: Int64Array,
        rows: StepRows,
        masks: "Future[MaskedRows] | None",
    ) -> None:
        if self._layout.samples:
            super()._sample(outcome, logits, sampling, rows, masks)

    def _fail(self, outcome: Outcome, rows: StepRows, row: int, reason: RowErrorReason) -> None:
        """Which rows fail is the sampling rank's to say."""
        if self._layout.samples:
            super()._fail(outcome, rows, row, reason)

    @property
    def _agreeing(self) -> Agreement:
        if self._agreement is None:
            raise GroupBroken("this rank has not joined the others")
        return self._agreement


def _merge(whole: Outcome, rows: Int64Array, part: Outcome) -> None:
    """Add what came of some rows; of ranks that do not sample, nothing did. Of a row that was cut
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
