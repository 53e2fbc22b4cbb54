"""One `ExecuteSteps` stream: results leave in the order in which plans arrived.

The event loop submits plans and awaits results; the model thread launches each plan; the follow-up
thread collects its result and queues it for the event loop. Plans queue up, so that the next one is
launched as soon as the last one was, so that the device can start it right after the last.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from worker_service.block_transfer.leases import LeasedBlocks
from worker_service.block_transfer.transfers import Transfers
from worker_service.engine.cached_blocks import CachedBlocks
from worker_service.engine.executor import FinishedStep, ModelThread, Runner, Step
from worker_service.engine.step_stats import StepLog, StepMeter
from worker_service.engine.tracing import StreamTraces
from worker_service.errors import GroupBroken, LeaseDenied, OutOfOrder, StepFailed, WorkerError
from worker_service.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

COLLECT_WAIT_S = 5.0
"""How long a stream that ends waits for the results of its last steps."""

MAX_PENDING_PLANS = 16
"""Plans that may wait here; more wait in the transport's flow control window."""


@dataclass(frozen=True, slots=True)
class _End:
    """The last item of a stream."""

    error: WorkerError | None


class StepStream:
    """The plans and results of one epoch.

    Created, submitted to and closed on the event loop. `is_closed` changes once, to true, so the
    model thread may read it at any time: it then skips the stream's remaining plans. Both threads
    may end the stream at the same time; the runner is reset once, on the model thread.
    """

    def __init__(
        self,
        epoch: int,
        runner: Runner,
        transfers: Transfers,
        thread: ModelThread,
        meter: StepMeter,
        traces: StreamTraces | None = None,
        cached_blocks: CachedBlocks | None = None,
    ) -> None:
        """transfers: of the runner's blocks, for this stream alone. cached_blocks: the worker's
        records, which this stream's plans continue."""
        self.epoch = epoch
        self.transfers = transfers
        self.is_closed = False
        self._cached_blocks = CachedBlocks() if cached_blocks is None else cached_blocks
        self._has_failed = False
        """Whether nothing more is collected. Used by the follow-up thread."""
        self._is_reset = False
        """Whether the runner was reset at the end. Used by the model thread."""
        self._is_intact = True
        """Whether the runner has done all that it was given, and nothing else. Used by the model
        thread."""
        self._held: list[StepResult] = []
        """Results that wait for later ones, to be sent together. Used by the follow-up thread."""
        self._runner = runner
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._next_step_id = 1
        self._summary = StepLog(epoch)
        self._meter = meter
        self._traces = traces
        self._capacity = asyncio.Semaphore(MAX_PENDING_PLANS)
        self._outbox: asyncio.Queue[list[StepResult] | _End] = asyncio.Queue()
        self._leases_changed = asyncio.Event()
        """Set, and replaced, when leases have begun or none begins any more."""

    async def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises OutOfOrder unless it is the next one."""
        if plan.epoch != self.epoch:
            raise OutOfOrder(f"the stream's epoch is {self.epoch}, the plan's is {plan.epoch}")
        if plan.step_id != self._next_step_id:
            raise OutOfOrder(f"step {self._next_step_id} is next, got step {plan.step_id}")
        self._next_step_id += 1
        self.transfers.notify()
        await self._capacity.acquire()
        self._thread.post(lambda: self._launch(plan))

    def finish(self, error: WorkerError | None = None) -> None:
        """End the stream after the results of all plans submitted before."""
        self._thread.post(lambda: self._end(error))

    def close(self, error: WorkerError | None = None) -> None:
        """End the stream now: drop plans that were not launched, forget all sequences."""
        if not self.is_closed:
            self.is_closed = True
            self.transfers.close()
            self._thread.post(self._reset)
        if self._traces is not None:
            traces = self._traces
            # After the steps that were collected: a client may end this process before the
            # follow-up thread has counted the step whose result it has.
            self._thread.post(lambda: self._thread.follow_up(traces.close))
        self._outbox.put_nowait(_End(error))
        self._announce_leases()

    async def leased_blocks(
        self, lease_id: int, token: bytes, blocks: Sequence[int]
    ) -> LeasedBlocks:
        """The blocks for a reader. A lease that has not begun is waited for, for a time. Raises
        LeaseDenied as `LeaseTable.open` does."""
        if (leases := self.transfers.leases) is None:
            raise LeaseDenied("the model has no blocks")
        with suppress(TimeoutError):
            async with asyncio.timeout(self.transfers.lease_wait_s):
                while not (leases.serves(lease_id) or self.is_closed):
                    await self._leases_changed.wait()
        return leases.open(lease_id, token, blocks)

    def _announce_leases(self) -> None:
        changed, self._leases_changed = self._leases_changed, asyncio.Event()
        changed.set()

    def keep_no_sequences(self) -> None:
        """Keep none for the next core, because the caches may be used for something else."""
        self._is_intact = False

    def end_idle_spans(self) -> None:
        """End the spans of requests that have had no step for a while."""
        if self._traces is not None:
            self._traces.end_idle()

    async def results(self) -> AsyncIterator[list[StepResult]]:
        """Results in order, grouped by message. Raises the stream's error."""
        while not isinstance(item := await self._outbox.get(), _End):
            for _ in item:
                self._capacity.release()
            yield item
        if item.error is not None:
            raise item.error

    def _launch(self, plan: StepPlan) -> None:
        if self.is_closed:
            return
        try:
            self._cached_blocks.begin(plan)
            late = _leases_of_moved_blocks(plan)
            self.transfers.begin(plan, late)
            if len(plan.leases) > len(late):
                self._on_loop(self._announce_leases)
            if not _moves_targets(plan):
                self._begin_fetches(plan)
            step = self._runner.launch(plan)
        except WorkerError as error:
            self._is_intact = False
            self._end(error)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._fail(_failure(plan, error))
        else:
            self._cached_blocks.finish(plan)
            may_wait = not isinstance(step, FinishedStep) or _has_no_work(plan)
            self._thread.follow_up(lambda: self._collect(plan, step), may_wait=may_wait)
            if late:
                self._thread.follow_up(lambda: self._serve_leases(late))
            if _moves_targets(plan):
                self._begin_fetches(plan)

    def _serve_leases(self, lease_ids: Sequence[int]) -> None:
        """Serve the leases of blocks that a step has written, once the device is done with it."""
        self.transfers.serve(lease_ids)
        self._on_loop(self._announce_leases)

    def _begin_fetches(self, plan: StepPlan) -> None:
        """Begin a plan's fetches once the device is done with the steps launched so far, which may
        write to blocks that the core has freed since."""
        if plan.fetches:
            begin = partial(self.transfers.begin_fetches, plan)
            self._thread.follow_up(begin, may_wait=False)

    def _collect(self, plan: StepPlan, step: Step) -> None:
        """Runs on the follow-up thread, or after the launch if there is nothing to wait for."""
        if self._has_failed:
            return
        try:
            result = step.collect()
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, WorkerError):
                ending = partial(self._end, error)
            else:
                ending = partial(self._fail, _failure(plan, error))
            self._thread.post(ending)
        else:
            if result.errors:
                self._cached_blocks.add_failure(plan.step_id)
            if _has_no_work(plan):
                self.transfers.wait_for_end(lambda: self._is_needed(plan))
            if ended := self.transfers.collect():
                result = replace(result, fetches=ended)
            self._held.append(result)
            if not self._may_wait(plan):
                self._put_held()
            self._summary.add(plan, result)
            if self._traces is not None:
                self._traces.record(plan, result)
            self._meter.count(plan, result)

    def _is_needed(self, plan: StepPlan) -> bool:
        """Whether the result of a plan without work is needed at once."""
        return self.is_closed or self._next_step_id - 1 > plan.step_id

    def _may_wait(self, plan: StepPlan) -> bool:
        """Whether a plan's result, and those held before it, may wait for one more: only if the
        device has another step queued behind the next one."""
        num_after = self._next_step_id - 1 - plan.step_id
        return len(self._held) < plan.max_results and num_after >= 2

    def _fail(self, error: StepFailed) -> None:
        """End after an unexpected error, after which no record is trusted."""
        self._is_intact = False
        self._cached_blocks.clear()
        self._end(error)

    def _end(self, error: WorkerError | None) -> None:
        """Runs on the model thread: nothing more is launched."""
        if not self.is_closed:
            self.is_closed = True
            self.transfers.close()
            self._on_loop(self._announce_leases)
            self._reset()
            self._thread.follow_up(lambda: self._put_end(error))

    def _reset(self) -> None:
        """Runs on the model thread, so that no later epoch's step or fetch comes before it."""
        if self._is_reset:
            return
        self._is_reset = True
        self.transfers.wait_closed()
        if self._is_intact:
            self._keep_sequences()
        self._runner.reset()

    def _keep_sequences(self) -> None:
        """Keep what the next core may continue with, once all failures of rows are known."""
        collected = threading.Event()
        self._thread.follow_up(collected.set)
        try:
            self._cached_blocks.sequences = self._runner.kept_sequences()
            if not collected.wait(COLLECT_WAIT_S):
                raise StepFailed("the last steps do not end")
        except GroupBroken as error:
            logger.warning("no sequences are kept epoch=%d reason=%s", self.epoch, error)
        except Exception:  # the device may raise anything; the next core then begins cold
            logger.exception("no sequences are kept epoch=%d", self.epoch)
            self._cached_blocks.clear()

    def _put_end(self, error: WorkerError | None) -> None:
        """Runs on the follow-up thread."""
        if self._held:
            self._put_held()
        self._put(_End(error))

    def _put_held(self) -> None:
        held, self._held = self._held, []
        self._put(held)

    def _put(self, item: list[StepResult] | _End) -> None:
        """Runs on the follow-up thread, so that the end comes after the last result."""
        self._on_loop(lambda: self._outbox.put_nowait(item))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # nothing awaits what it does
            logger.debug("the event loop is closed")


def _leases_of_moved_blocks(plan: StepPlan) -> list[int]:
    """The leases of blocks to which a cache operation of their plan writes, such as one that is
    evicted to the host: until then it has what another sequence has left there."""
    if not plan.leases or not (len(plan.swap_out) or len(plan.swap_in) or len(plan.copy)):
        return []
    written = np.concatenate([~plan.swap_out[:, 1], plan.swap_in[:, 1], plan.copy[:, 1]])
    return [one.lease_id for one in plan.leases if np.isin(one.block_ids, written).any()]


def _moves_targets(plan: StepPlan) -> bool:
    """Whether a cache operation of a plan touches the targets of its fetches."""
    if not plan.fetches or not (len(plan.swap_out) or len(plan.copy)):
        return False
    moved = np.concatenate([plan.swap_out[:, 0], plan.copy.ravel()])
    return any(bool(np.isin(fetch.blocks[:, 1], moved).any()) for fetch in plan.fetches)


def _has_no_work(plan: StepPlan) -> bool:
    """Whether nothing depends on a plan's result but the ends of fetches."""
    columns = plan.seq_ids, plan.swap_out, plan.swap_in, plan.copy, plan.ended_lease_ids
    return not plan.leases and not any(map(len, columns))


def _failure(plan: StepPlan, error: BaseException) -> StepFailed:
    """The failure as reported to the core; the traceback stays in our log."""
    logger.error("step failed epoch=%d step_id=%d", plan.epoch, plan.step_id, exc_info=error)
    return StepFailed(f"step {plan.step_id} failed: {type(error).__name__}")
