"""One line of log about many steps."""

import logging
import time

from worker_service.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StepSummary:
    """Counts steps and writes them down every `INTERVAL_S` seconds in which there were any."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._start()

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """Take note of one step."""
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
