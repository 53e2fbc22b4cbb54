"""Counts of a worker's steps: for Prometheus and traces, and as one log line per interval."""

import logging
import time

from service_common.prometheus import Histogram
from worker_service.array_types import Int32Array
from worker_service.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


STEP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""Seconds."""

TOKENS_PER_ROW_BOUNDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 65)


class StepMeter:
    """Counters of steps. One thread writes them and any may read them; a reader may see the
    counters of different instants."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.num_sampled = 0
        self.num_drafts = 0
        self.num_kept_drafts = 0
        self.tokens_per_row = Histogram(TOKENS_PER_ROW_BOUNDS)
        """Tokens per row, of rows with drafts."""
        self.num_row_errors = 0
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0
        self.num_copied_blocks = 0
        self.cache_ops_us = 0
        self.forward_us = 0
        self.sample_us = 0
        self.other_us = 0
        """Time of steps that none of the three above accounts for."""
        self.idle_without_plan_us = 0
        """Time between steps of a stream without a plan to compute."""
        self.idle_with_plan_us = 0
        """Time between steps while a plan was waiting."""
        self.durations = Histogram(STEP_BOUNDS)
        """Durations of steps, in seconds."""
        self._epoch = 0
        self._last_finished_us = 0

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_tokens += int(plan.num_tokens.sum())
        self.num_sampled += len(result.token_ids)
        self.num_row_errors += len(result.errors)
        self.num_swapped_out_blocks += len(plan.swap_out)
        self.num_swapped_in_blocks += len(plan.swap_in)
        self.num_copied_blocks += len(plan.copy)
        if result.num_drafts is not None and result.num_sampled is not None:
            self._count_drafts(result.num_drafts, result.num_sampled)
        self._count_time(result)
        self._count_idle(result)

    def _count_drafts(self, num_drafts: Int32Array, num_sampled: Int32Array) -> None:
        has_drafts = num_drafts > 0
        self.num_tokens += int(num_drafts.sum())
        self.num_drafts += int(num_drafts.sum())
        self.num_kept_drafts += int((num_sampled[has_drafts] - 1).sum())
        for count in num_sampled[has_drafts].tolist():
            self.tokens_per_row.observe(count)

    def _count_time(self, result: StepResult) -> None:
        timings = result.timings
        busy_us = timings.finished_us - timings.started_us
        self.durations.observe(busy_us / 1e6)
        counted_us = timings.cache_ops_us + timings.forward_us + timings.sample_us
        self.cache_ops_us += timings.cache_ops_us
        self.forward_us += timings.forward_us
        self.sample_us += timings.sample_us
        self.other_us += max(0, busy_us - counted_us)

    def _count_idle(self, result: StepResult) -> None:
        """The time since the step before, in the same stream."""
        timings = result.timings
        if result.epoch == self._epoch:
            ready_us = max(self._last_finished_us, timings.received_us)
            self.idle_without_plan_us += ready_us - self._last_finished_us
            self.idle_with_plan_us += max(0, timings.started_us - ready_us)
        self._epoch = result.epoch
        self._last_finished_us = timings.finished_us


INTERVAL_S = 10.0


class StepLog:
    """Logs each step, and a summary every `INTERVAL_S` seconds in which there were steps."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._start()

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """Count one step."""
        busy_us = result.timings.finished_us - result.timings.started_us
        num_tokens = int(plan.num_tokens.sum())
        logger.debug(
            "step done epoch=%d step_id=%d num_rows=%d num_tokens=%d num_errors=%d busy_us=%d",
            plan.epoch,
            plan.step_id,
            len(plan.seq_ids),
            num_tokens,
            len(result.errors),
            busy_us,
        )
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_sampled += len(result.token_ids)
        self._busy_us += busy_us
        elapsed_s = time.monotonic() - self._started
        if elapsed_s >= INTERVAL_S:
            self._write(elapsed_s)
            self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._num_steps = self._num_tokens = self._num_sampled = self._busy_us = 0

    def _write(self, elapsed_s: float) -> None:
        logger.info(
            "steps epoch=%d num_steps=%d tokens_per_s=%.0f sampled_per_s=%.0f busy_share=%.2f",
            self._epoch,
            self._num_steps,
            self._num_tokens / elapsed_s,
            self._num_sampled / elapsed_s,
            self._busy_us / 1e6 / elapsed_s,
        )
