"""Steps in flight: plans whose results are not in yet, and how many of them there may be.

As a rule just enough steps are planned ahead that the worker never waits. A step's messages,
however, take processor time of the core and of the worker whatever is in them, and on a CPU the
model computes on the same cores. So where nobody waits for the tokens of each step, more steps are
planned, and the plans and results of several travel together.
"""

from collections import deque
from dataclasses import dataclass

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.scheduling.worker_group_state import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceStatus
from scheduler_service.core.stats.throughput import StepRates, StepWork
from scheduler_service.core.step_plan import StepResult


class ResultMismatch(Exception):
    """A worker's result does not answer the oldest open plan: the worker cannot be trusted."""


@dataclass(slots=True, eq=False)
class InFlightStep:
    """What a result is read against."""

    step_id: int
    rows: list[Sequence]
    """In batch order."""
    sampled: list[Sequence]
    """Those of the rows that sample; the same list when all do."""
    prefills: list[tuple[Sequence, int, bool]]
    """Rows of prefills: the sequence, how many of its tokens are computed with this step, and
    whether these are all. Forks, whose parents compute for them, are among them."""
    lockstep_rows: list[int]
    """Rows that report candidates, in order."""
    work: StepWork
    """What it takes the worker."""


class Pipeline:
    """Open steps of one worker group, answered in order."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._steps: deque[InFlightStep] = deque()
        self._num_planned = 0

    def __len__(self) -> int:
        """Steps that are open."""
        return len(self._steps)

    @property
    def next_step_id(self) -> int:
        """The number of the next plan, from 1."""
        return self._num_planned + 1

    @property
    def newest_work(self) -> StepWork:
        """What the newest open step takes."""
        return self._steps[-1].work

    @property
    def is_prefilling(self) -> bool:
        """Whether an open step computes prompts."""
        return any(step.prefills for step in self._steps)

    def open_rows(self) -> set[Sequence]:
        """Sequences with rows in flight."""
        return {seq for step in self._steps for seq in step.rows}

    def push(self, step: InFlightStep) -> None:
        """A plan is on its way."""
        assert step.step_id == self.next_step_id
        self._num_planned += 1
        self._steps.append(step)

    def pop(self, result: StepResult) -> InFlightStep:
        """The step that a result answers. Raises ResultMismatch if it does not."""
        if not self._steps:
            raise ResultMismatch(f"no step is open, result has step_id={result.step_id}")
        step = self._steps[0]
        if result.step_id != step.step_id:
            raise ResultMismatch(f"expected step_id={step.step_id}, result has {result.step_id}")
        self._check_rows(step, result)
        return self._steps.popleft()

    def _check_rows(self, step: InFlightStep, result: StepResult) -> None:
        tokens = result.token_ids
        if len(tokens) != len(step.sampled):
            raise ResultMismatch(f"expected {len(step.sampled)} tokens, result has {len(tokens)}")
        self._check_candidates(step, result)
        for rows in (result.errors, result.logprobs, result.prompt_logprobs):
            if rows and not 0 <= min(rows) <= max(rows) < len(step.rows):
                raise ResultMismatch(f"result names a row beyond the {len(step.rows)} of the batch")
        if tokens and max(tokens) >= self._vocab_size:
            raise ResultMismatch(f"token {max(tokens)} is not below {self._vocab_size}")
        if tokens and min(tokens) < 0:
            failed = {step.rows[row] for row in result.errors}
            failed |= {step.rows[row] for row in result.candidates}
            for seq, token in zip(step.sampled, tokens, strict=True):
                if token < 0 and seq not in failed:
                    raise ResultMismatch(f"seq_id={seq.seq_id} has neither a token nor an error")

    def _check_candidates(self, step: InFlightStep, result: StepResult) -> None:
        missing = [row for row in step.lockstep_rows if row not in result.candidates]
        if any(row not in result.errors for row in missing):
            raise ResultMismatch(f"row {missing[0]} has neither candidates nor an error")
        if len(missing) + len(result.candidates) != len(step.lockstep_rows):
            raise ResultMismatch("result has candidates for a row that was to choose")
        for candidates in result.candidates.values():
            tokens = candidates.token_ids
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                raise ResultMismatch(f"a candidate is not below {self._vocab_size}")


MAX_STEPS_TOGETHER_US = 100_000
"""The most that steps which travel together may take, as a request that comes now has to wait for
all that are planned."""


class PipelineDepth:
    """The lead over one worker group."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerGroupCapacity,
        running: RunningSet,
        rates: StepRates,
    ) -> None:
        self._depth = config.pipeline_depth
        self._max_together = config.max_steps_together if capacity.takes_several_plans else 1
        self._running = running
        self._rates = rates
        self._patience_us = 0
        self._num_changes = -1
        """Of the batch when its patience was looked up."""

    def num_together(self) -> int:
        """Steps of the present batch that may be sent together, if no other request waits."""
        step_us, running = self._rates.us_per_decode_step, self._running
        if self._max_together == 1 or not step_us or running.prefilling or running.arriving:
            return 1
        most_us = min(self._patience(), MAX_STEPS_TOGETHER_US)
        return max(1, min(self._max_together, int(most_us / step_us)))

    def depth(self, num_together: int) -> int:
        """Steps that may be in flight: those that return together, and one to continue with."""
        return self._depth if num_together == 1 else max(self._depth, num_together + 1)

    def _patience(self) -> int:
        """How long all that decodes may wait for its tokens, in microseconds."""
        running = self._running
        if running.num_changes != self._num_changes:
            # What has ended is in the list until the next plan, and would be remembered.
            present = (seq for seq in running.decoding if seq.status is SequenceStatus.RUNNING)
            seq_groups = {seq.seq_group for seq in present}
            self._patience_us = min((seq_group.patience_us for seq_group in seq_groups), default=0)
            self._num_changes = running.num_changes
        return self._patience_us
