"""Steps in flight: plans whose results have not arrived, and how many of them there may be.

Usually just enough steps are planned ahead to keep the worker busy. But each message costs the
core and the worker CPU time whatever its size, and on a CPU the model computes on the same cores.
So when no client waits for the tokens of each step, more steps are planned, and the plans and
results of several steps are sent together.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.request_timing import StepClock
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.step_plan import RowOutput, StepResult
from scheduler_service.core.throughput import StepRates, StepWork

MAX_HOLD_US = 100_000
"""The longest that steps which travel together may take, because a request that arrives now waits
for all steps that are already planned."""


class ResultMismatch(Exception):
    """A worker's result does not answer the oldest open plan: the worker cannot be trusted."""


@dataclass(slots=True, eq=False)
class InFlightStep:
    """The rows of a plan in flight, which its result refers to."""

    step_id: int
    rows: list[Sequence]
    """The rows, in batch order."""
    sampled: list[Sequence]
    """The rows that sample; the same list when all do."""
    lookahead: list[int] | None
    """The most drafts of each row, as in the plan. Rows with drafts precede those that do not
    sample."""
    prefills: list[tuple[Sequence, int, bool]]
    """Rows of prefills: the sequence, how many of its tokens are computed with this step, and
    whether these are all. Forks, whose parents compute for them, are among them."""
    other_outputs: dict[int, RowOutput]
    """What rows bring that bring something other than a token, in order."""
    vectors: dict[int, tuple[int, int]]
    """By row that brings vectors: the first token's index, and their number."""
    work: StepWork
    """Estimated duration on the worker."""

    def rows_with(self, output: RowOutput) -> list[int]:
        """The rows that bring candidates, or vectors."""
        return [row for row, other in self.other_outputs.items() if other is output]


def _check_counts(step: InFlightStep, result: StepResult) -> None:
    """A row has at most the drafts that its plan allows, and from one token to one more than it has
    drafts."""
    num_rows = len(step.sampled)
    for what, column in (("tokens", result.num_sampled), ("drafts", result.num_drafts)):
        if column is not None and len(column) != num_rows:
            raise ResultMismatch(f"expected {num_rows} numbers of {what}, result has {len(column)}")
    lookahead = step.lookahead or [0] * num_rows
    counts = result.num_sampled or [1] * num_rows
    num_drafts = result.num_drafts or lookahead
    for row in zip(step.sampled, counts, num_drafts, lookahead, strict=False):
        seq, count, num_computed, max_drafts = row
        if not 1 <= count <= 1 + max_drafts:
            problem = f"{count} tokens, expected 1 to {1 + max_drafts}"
        elif not count - 1 <= num_computed <= max_drafts:
            problem = f"{num_computed} drafts, expected {count - 1} to {max_drafts}"
        else:
            continue
        raise ResultMismatch(f"seq_id={seq.seq_id} has {problem}")


def _check_logprobs(step: InFlightStep, result: StepResult) -> None:
    """Each token of a row that reports log probabilities has an entry."""
    if not (result.kept_logprobs or (result.logprobs and result.num_sampled)):
        return
    counts = dict(zip(step.sampled, result.num_sampled or (), strict=False))
    for row in result.logprobs.keys() | result.kept_logprobs.keys():
        entries = (row in result.logprobs) + len(result.kept_logprobs.get(row, ()))
        count = counts.get(step.rows[row], 1)
        if entries != count:
            problem = f"row {row} has {entries} log probabilities"
            raise ResultMismatch(f"{problem}, expected one for each of its {count} tokens")


class Pipeline:
    """Steps in flight of one worker group, answered in order, and how long they take."""

    def __init__(self, config: SchedulerConfig, capacity: WorkerGroupCapacity, now_us: int) -> None:
        self.clock = StepClock(now_us)
        self.rates = StepRates()
        self._vocab_size = capacity.vocab_size
        self._depth = config.pipeline_depth
        self._max_results = config.max_results
        self.may_hold_results = self._max_results > 1
        """Whether the results of several steps may ever be sent together."""
        self._steps: deque[InFlightStep] = deque()
        self._num_planned = 0

    def __len__(self) -> int:
        """The number of steps in flight."""
        return len(self._steps)

    @property
    def next_step_id(self) -> int:
        """The number of the next plan, from 1."""
        return self._num_planned + 1

    @property
    def newest_work(self) -> StepWork:
        """The work of the newest step in flight."""
        return self._steps[-1].work

    @property
    def is_prefilling(self) -> bool:
        """Whether a step in flight computes prompts."""
        return any(step.prefills for step in self._steps)

    def open_rows(self) -> set[Sequence]:
        """Sequences with rows in flight."""
        return {seq for step in self._steps for seq in step.rows}

    def max_results(self, max_hold_us: Callable[[], int]) -> int:
        """How many decode steps' results may be sent together; `max_hold_us` returns how long the
        clients of all running requests allow their tokens to be held."""
        step_us = self.rates.us_per_decode_step
        if not step_us:
            return 1
        return max(1, min(self._max_results, int(min(max_hold_us(), MAX_HOLD_US) / step_us)))

    def is_full(self, max_results: int) -> bool:
        """Whether the maximum of steps is in flight: those whose results return together, and one
        for the worker to continue with."""
        depth = self._depth if max_results == 1 else max(self._depth, max_results + 1)
        return len(self._steps) >= depth

    def push(self, step: InFlightStep) -> None:
        """Add a step whose plan is about to be sent."""
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
        tokens, num_tokens = result.token_ids, len(step.sampled)
        if result.num_sampled is not None or result.num_drafts is not None:
            _check_counts(step, result)
        if result.num_sampled is not None:
            num_tokens = sum(result.num_sampled)
        if len(tokens) != num_tokens:
            raise ResultMismatch(f"expected {num_tokens} tokens, result has {len(tokens)}")
        if step.other_outputs or result.candidates or result.vectors:
            self._check_other_outputs(step, result)
        named = (result.errors, result.logprobs, result.kept_logprobs, result.prompt_logprobs)
        for rows in named:
            if rows and not 0 <= min(rows) <= max(rows) < len(step.rows):
                raise ResultMismatch(f"result names a row beyond the {len(step.rows)} of the batch")
        _check_logprobs(step, result)
        if tokens and max(tokens) >= self._vocab_size:
            raise ResultMismatch(f"token {max(tokens)} is not below {self._vocab_size}")
        if tokens and min(tokens) < 0:
            failed = {step.rows[row] for row in result.errors}
            failed |= {step.rows[row] for row in result.candidates}
            counts = result.num_sampled or [1] * num_tokens
            sampled = chain.from_iterable(map(repeat, step.sampled, counts))
            for seq, token in zip(sampled, tokens, strict=True):
                if token < 0 and seq not in failed:
                    raise ResultMismatch(f"seq_id={seq.seq_id} has neither a token nor an error")

    def _check_other_outputs(self, step: InFlightStep, result: StepResult) -> None:
        """Each row has exactly what its plan says, of the right size, or an error."""
        brought = (RowOutput.CANDIDATES, result.candidates), (RowOutput.VECTOR, result.vectors)
        for output, values in brought:
            name, rows = f"{output.name.lower()}", step.rows_with(output)
            missing = [row for row in rows if row not in values and row not in result.errors]
            if missing:
                raise ResultMismatch(f"row {missing[0]} has neither {name} nor an error")
            if further := values.keys() - set(rows):
                raise ResultMismatch(f"row {min(further)} has {name}, which its plan does not want")
        for candidates in result.candidates.values():
            tokens = candidates.token_ids
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                raise ResultMismatch(f"a candidate is not below {self._vocab_size}")
        for row, vectors in result.vectors.items():
            _, number = step.vectors[row]
            expected = number * step.rows[row].seq_group.strategy.vector_bytes
            if len(vectors) != expected:
                what = f"the {number} vectors" if number > 1 else "the vector"
                got = f"{len(vectors)} bytes, expected {expected}"
                raise ResultMismatch(f"{what} of row {row}: {got}")
