"""Steps are launched ahead of their results, and results come in order, then what ended them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from itertools import chain

import numpy as np
import pytest

from tests.support.peers import no_transfers
from tests.support.plans import step_plan
from worker_service.engine.cached_blocks import CachedBlocks
from worker_service.engine.executor import ModelThread
from worker_service.engine.step_stats import StepMeter
from worker_service.engine.step_stream import StepStream
from worker_service.errors import InvalidPlan, StepFailed, WorkerError
from worker_service.plan import KeptSequence, StepPlan, StepResult, StepTimings

SOON_S = 60.0


class Launched:
    """A step whose device is done when the test says so."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.is_done = threading.Event()
        self.failure: BaseException | None = None

    def collect(self) -> StepResult:
        assert self.is_done.wait(SOON_S)
        if self.failure is not None:
            raise self.failure
        timings = StepTimings(
            received_us=0, started_us=0, finished_us=0, cache_ops_us=0, forward_us=0, sample_us=0
        )
        return StepResult(
            epoch=1,
            step_id=self.plan.step_id,
            token_ids=np.zeros(0, np.int32),
            timings=timings,
        )


KEPT = KeptSequence(seq_id=1, token_ids=np.zeros(4, np.int32), context=(), tables=())


class Launcher:
    """A runner that records its calls. Cannot launch step `bad_step`."""

    block_memory = None

    def __init__(self, bad_step: int | None = None, failure: BaseException | None = None) -> None:
        """failure: None refuses the step's plan."""
        self.bad_step = bad_step
        self.failure = failure or InvalidPlan("seq_ids", "made up")
        self.steps: list[Launched] = []
        self.num_resets = 0

    def launch(self, plan: StepPlan) -> Launched:
        if plan.step_id == self.bad_step:
            raise self.failure
        self.steps.append(Launched(plan))
        return self.steps[-1]

    def kept_sequences(self) -> list[KeptSequence]:
        return [] if self.num_resets else [KEPT]

    def reset(self) -> None:
        self.num_resets += 1


def empty_plan(step_id: int, max_results: int = 0) -> StepPlan:
    return step_plan(step_id=step_id, max_results=max_results)


@pytest.fixture
async def thread() -> AsyncIterator[ModelThread]:
    thread = ModelThread()
    yield thread
    thread.stop(wait_s=10)


async def submit(stream: StepStream, thread: ModelThread, count: int, max_results: int = 0) -> None:
    for step_id in range(1, count + 1):
        await stream.submit(empty_plan(step_id, max_results))
    await thread.run(lambda: None)


async def collected(stream: StepStream) -> tuple[list[int], WorkerError | None]:
    """The steps whose results came, one by one, and the error after them."""
    together, error = await collected_together(stream)
    assert all(len(step_ids) == 1 for step_ids in together)
    return list(chain.from_iterable(together)), error


async def collected_together(stream: StepStream) -> tuple[list[list[int]], WorkerError | None]:
    """The steps whose results came together, and the error after them."""
    together = []
    try:
        async with asyncio.timeout(SOON_S):
            async for results in stream.results():
                together.append([result.step_id for result in results])
    except WorkerError as error:
        return together, error
    return together, None


async def test_steps_are_launched_while_an_earlier_one_is_under_way(thread: ModelThread) -> None:
    runner, meter = Launcher(), StepMeter()
    stream = StepStream(1, runner, no_transfers(), thread, meter)
    await submit(stream, thread, 3)
    assert len(runner.steps) == 3
    for step in reversed(runner.steps):
        step.is_done.set()
    stream.finish()
    assert await collected(stream) == ([1, 2, 3], None)
    assert meter.num_steps == 3
    assert runner.num_resets == 1


async def test_a_plan_that_is_refused_ends_the_stream_after_the_results_before_it(
    thread: ModelThread,
) -> None:
    runner = Launcher(bad_step=3)
    stream = StepStream(1, runner, no_transfers(), thread, StepMeter())
    await submit(stream, thread, 4)
    for step in runner.steps:
        step.is_done.set()
    step_ids, error = await collected(stream)
    assert (step_ids, type(error)) == ([1, 2], InvalidPlan)
    assert len(runner.steps) == 2


class Panic(BaseException):
    """That of a library in Rust, which is no Exception."""


async def test_a_failure_of_any_kind_to_launch_a_step_ends_the_stream(thread: ModelThread) -> None:
    stream = StepStream(1, Launcher(1, Panic("oh")), no_transfers(), thread, StepMeter())
    await submit(stream, thread, 2)
    step_ids, error = await collected(stream)
    assert (step_ids, type(error)) == ([], StepFailed)
    assert "step 1 failed: Panic" in str(error)


@pytest.mark.parametrize("failure", [RuntimeError("the device is gone"), Panic("oh")])
async def test_a_failure_of_the_device_ends_the_stream_and_later_results_do_not_count(
    thread: ModelThread, failure: BaseException
) -> None:
    runner = Launcher()
    stream = StepStream(1, runner, no_transfers(), thread, StepMeter())
    await submit(stream, thread, 3)
    runner.steps[1].failure = failure
    for step in runner.steps:
        step.is_done.set()
    step_ids, error = await collected(stream)
    assert (step_ids, type(error)) == ([1], StepFailed)
    assert f"step 2 failed: {type(failure).__name__}" in str(error)
    assert runner.num_resets == 1


class StepsAtClose:
    """Spans that record how many steps were counted when they ended."""

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter
        self.num_steps: int | None = None

    def record(self, plan: StepPlan, result: StepResult) -> None:
        assert self.num_steps is None, "a step after the end"

    def close(self) -> None:
        self.num_steps = self.meter.num_steps


async def test_spans_of_a_stream_that_is_closed_include_the_steps_being_collected() -> None:
    thread, runner, meter = ModelThread(), Launcher(), StepMeter()
    traces = StepsAtClose(meter)
    stream = StepStream(1, runner, no_transfers(), thread, meter, traces)  # type: ignore[arg-type]
    await submit(stream, thread, 2)
    stream.close()
    for step in runner.steps:
        step.is_done.set()
    assert thread.stop(wait_s=10)
    assert traces.num_steps == 2


@pytest.mark.parametrize("end", [StepStream.close, StepStream.finish])
async def test_a_stream_ends_with_what_it_is_told(
    thread: ModelThread, end: Callable[[StepStream, WorkerError], None]
) -> None:
    stream = StepStream(1, Launcher(), no_transfers(), thread, StepMeter())
    error = StepFailed("made up")
    end(stream, error)
    assert await collected(stream) == ([], error)


class EndedTwice(StepStream):
    """Closed on the event loop as soon as the model thread has found that it is open."""

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """As the attribute."""
        was_closed = self._was_closed
        if not was_closed and threading.current_thread().name == "model":
            closed = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (self.close(), closed.set()))
            assert closed.wait(SOON_S)
        return was_closed

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        self._was_closed = value


async def test_a_stream_that_ends_twice_at_once_keeps_the_sequences_of_its_runner(
    thread: ModelThread,
) -> None:
    runner, kept = Launcher(), CachedBlocks()
    stream = EndedTwice(1, runner, no_transfers(), thread, StepMeter(), cached_blocks=kept)
    stream.finish()
    assert await collected(stream) == ([], None)
    await thread.run(lambda: None)
    await thread.run(lambda: None)  # after what `close` has posted
    assert runner.num_resets == 1
    assert kept.sequences == [KEPT]


@pytest.mark.parametrize(
    ("allowed", "together"),
    [
        (1, [[1], [2], [3], [4], [5]]),
        (2, [[1, 2], [3, 4], [5]]),
        (8, [[1, 2, 3, 4], [5]]),
    ],
)
async def test_results_wait_as_allowed_while_another_step_is_at_hand(
    thread: ModelThread, allowed: int, together: list[list[int]]
) -> None:
    """Once a single step is left, the core is to plan what comes after it."""
    runner = Launcher()
    stream = StepStream(1, runner, no_transfers(), thread, StepMeter())
    await submit(stream, thread, 5, allowed)
    for step in runner.steps:
        step.is_done.set()
    stream.finish()
    assert await collected_together(stream) == (together, None)
