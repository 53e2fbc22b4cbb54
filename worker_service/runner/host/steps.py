"""Steps that are computed when they are launched: forward pass and sampling, on the host."""

from concurrent.futures import Future

from worker_service.array_types import Int64Array
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.plan import StepPlan, monotonic_us
from worker_service.runner.batch.forward import HostForward
from worker_service.runner.batch.micro_batches import micro_batches
from worker_service.runner.batch.pooling import Pooling
from worker_service.runner.batch.rank_outcomes import RankOutcomes
from worker_service.runner.batch.step_outcome import StepOutcome
from worker_service.runner.batch.step_rows import StepRows, resolve_rows
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.host.sampling import report_prompts, sample_rows
from worker_service.runner.state.sequence_state import SequenceState
from worker_service.structured.masks import MaskedRows


class HostSteps:
    """Computes steps on one KV cache until their tokens are there."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        ranks: RankOutcomes,
        speculation: Speculation | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """ranks: that share the model; speculation: None adds no drafts; pooling: None generates
        tokens."""
        self._model = model
        self._ranks = ranks
        self._speculation = speculation
        self._pooling = pooling
        device, with_logits = cache.device_cache.device, ranks.layout.is_last_stage
        self._forward = HostForward(model, cache.caches, device, with_logits=with_logits)

    def compute(self, plan: StepPlan, row_ids: Int64Array, sequences: SequenceState) -> StepOutcome:
        """Compute and sample a plan's rows, in micro-batches if stages share the model. row_ids:
        [num_rows], rows of the table. Raises InvalidPlan and GroupBroken."""
        table = sequences.table
        if table.rows.num_parts == 1:
            return self._compute(plan, row_ids, sequences)
        outcome = StepOutcome.of_failed(len(row_ids), {})
        for rows, part in micro_batches(plan, row_ids, table):
            outcome.add_part(rows, self._compute(part, row_ids[rows], sequences))
        return outcome

    def _compute(
        self, plan: StepPlan, row_ids: Int64Array, sequences: SequenceState
    ) -> StepOutcome:
        layout, table, speculation = self._ranks.layout, sequences.table, self._speculation
        if not layout.samples:
            sequences.pending.resolve(row_ids)
        started_us = monotonic_us()
        rows = resolve_rows(plan, row_ids, table)
        are_decodes = rows.are_decodes
        if speculation is not None and layout.world_size > 1:
            rows = speculation.add_next(rows, plan, table)
        elif speculation is not None and plan.lookahead.any():
            rows = speculation.add(rows, plan, sequences)
        table.advance(row_ids, rows.num_computed, row_ids[rows.parents], row_ids[rows.forks])
        outcome = StepOutcome.of_failed(len(row_ids), rows.errors)
        masks = _begin_masks(rows, sequences) if layout.samples and sequences.masks else None
        forward = self._forward.run(rows, table)
        outcome.forward_us = monotonic_us() - started_us
        if forward is not None:
            if table.prompt_logprobs and layout.is_last_stage:
                report_prompts(outcome, rows, forward, self._model, table, samples=layout.samples)
            if forward.logits is not None and layout.samples:
                masked = masks.result() if masks is not None else None
                sample_rows(outcome, rows, forward, masked, table, speculation)
            if self._pooling is not None and layout.samples:
                for pooled in self._pooling.pool(rows, forward.hidden, table):
                    outcome.add_vectors(pooled, pooled.values.cpu().numpy())
            if speculation is not None:
                speculation.observe(rows, forward.captured, table)
        if layout.world_size > 1:
            self._exchange(plan, rows, outcome, sequences)
        if speculation is not None and are_decodes:
            speculation.record_step(rows, monotonic_us() - started_us)
        return outcome

    def _exchange(
        self, plan: StepPlan, rows: StepRows, outcome: StepOutcome, sequences: SequenceState
    ) -> None:
        """Give the other ranks the outcome, or expect it. Where the core allows drafts, it holds
        those of the next step."""
        num_drafts = 0
        speculation, table, pending = self._speculation, sequences.table, sequences.pending
        if speculation is not None and plan.lookahead.any():
            num_drafts = speculation.max_drafts
        if speculation is not None and num_drafts:
            outcome.next_drafts = speculation.choose_next(rows, sequences)

        def resolved(_: Int64Array, num_accepted: Int64Array) -> None:
            if speculation is not None:
                speculation.restore_states(rows, num_accepted, table)

        self._ranks.exchange(plan.step_id, rows, outcome, table, pending, num_drafts, resolved)


def _begin_masks(rows: StepRows, sequences: SequenceState) -> "Future[MaskedRows] | None":
    """Begin to compute which tokens constraints allow, concurrently with the forward pass."""
    num_drafts = None if rows.drafts is None else rows.drafts.offsets
    constrained = sequences.constrained_rows(rows.row_ids[rows.sampling], num_drafts)
    masks = sequences.masks
    return masks.begin(constrained) if constrained and masks is not None else None
