"""The leases and fetches of one stream of plans."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from worker_service.array_types import Int32Array
from worker_service.block_transfer.leases import LeaseTable
from worker_service.block_transfer.memory import BlockMemory
from worker_service.block_transfer.process_memory import MemoryUnreadable, machine_name
from worker_service.block_transfer.transport import (
    ArrivingBlocks,
    Connect,
    FetchFailed,
    Part,
    Parts,
    Reader,
    ReadRequest,
    Stopped,
    WriteGuard,
)
from worker_service.errors import InvalidPlan
from worker_service.plan import BlockFetch, FetchFailure, FetchResult, StepPlan, monotonic_us

logger = logging.getLogger(__name__)

STALL_S = 2.0
"""How long a source may send nothing."""

LEASE_WAIT_S = 1.0
"""How long a reader waits for its lease to begin: the core sends the plan with the lease when it
sends the reader the one with the fetch. Less than `STALL_S`."""

MAX_RESULT_DELAY_S = 0.1
"""How long the result of a plan without rows waits for the end of a fetch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """How this worker reaches others, and its place in its group."""

    connect: Connect
    disconnect: Callable[[], None] = lambda: None
    """Closes connections that are kept for the next `connect`."""
    rank: int = 0
    world_size: int = 1
    reads_memory: bool = True
    """Whether to copy from the memory of processes of this machine."""
    stall_s: float = STALL_S
    lease_wait_s: float = LEASE_WAIT_S


class FetchThreads:
    """Threads that are kept for further jobs: where processors are busy, a new thread begins later
    than one that wakes up."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_idle = 0
        self._is_closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Run a job now, beside all others, unless this is closed; it must handle its own
        exceptions."""
        with self._lock:
            if self._is_closed:
                return
            self._jobs.put(job)
            if self._num_idle:
                self._num_idle -= 1
                return
            self._num_threads += 1
        threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def close(self) -> None:
        """End the threads after their jobs."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._num_idle += 1


class Fetch:
    """One fetch, on a thread of its own."""

    def __init__(
        self,
        fetch: BlockFetch,
        memory: BlockMemory,
        peers: Peers,
        guard: WriteGuard,
        *,
        received_us: int,
        on_end: Callable[[FetchResult], None],
    ) -> None:
        """guard: of the writes to the targets; received_us: when the fetch's plan arrived; on_end:
        called once on the fetch's thread when it writes no more, unless the guard was closed. The
        call may end later."""
        self._fetch = fetch
        self._memory: BlockMemory | None = memory
        self._peers = peers
        self._guard = guard
        self._deadline_us = received_us + fetch.timeout_ms * 1000
        self._on_end = on_end
        self._parts: Parts | None = None
        self._rest: Iterator[Part] = iter(())
        """What follows once all blocks have arrived: the end of the call."""
        self._num_bytes = 0
        self._transport = ""
        self._progress_s = 0.0
        self._has_stalled = False
        self._ended = threading.Event()

    def start(self, threads: FetchThreads) -> None:
        """Begin."""
        threads.run(self._run)
        threads.run(self._watch)

    def stop(self) -> None:
        """Make the thread end soon. The guard refuses its writes meanwhile."""
        if (parts := self._parts) is not None:
            parts.cancel()

    def _run(self) -> None:
        try:
            if (result := self._result()) is not None:
                self._on_end(result)
            self._end_call()
        finally:
            self._ended.set()

    def _result(self) -> FetchResult | None:
        """Copy the blocks; None if the guard was closed."""
        started_us = monotonic_us()
        failure, message = None, ""
        try:
            self._receive()
        except Stopped:
            return None
        except FetchFailed as error:
            failure, message = self._reason(error), str(error)
        except Exception as error:
            logger.exception("fetch failed fetch_id=%d", self._fetch.fetch_id)
            failure, message = FetchFailure.INTERNAL, type(error).__name__
        finally:
            self._memory = None
        duration_us = monotonic_us() - started_us
        logger.log(
            logging.DEBUG if failure is None else logging.WARNING,
            "fetch ended fetch_id=%d num_blocks=%d duration_us=%d transport=%s failure=%s error=%s",
            self._fetch.fetch_id,
            len(self._fetch.blocks),
            duration_us,
            self._transport,
            failure and failure.name,
            message,
        )
        return FetchResult(
            fetch_id=self._fetch.fetch_id,
            failure=failure,
            message=message,
            num_bytes=self._num_bytes,
            duration_us=duration_us,
            transport=self._transport,
        )

    def _end_call(self) -> None:
        """Let the call end, so that its connection can be used again."""
        with suppress(FetchFailed):
            deque(self._rest, maxlen=0)
        self.stop()

    def _reason(self, error: FetchFailed) -> FetchFailure:
        """The failure, or what made this worker end the call."""
        if self._has_stalled:
            return FetchFailure.STALLED
        is_late = monotonic_us() >= self._deadline_us
        return FetchFailure.TIMED_OUT if is_late else error.failure

    def _receive(self) -> None:
        machine = machine_name() if self._peers.reads_memory else ""
        if machine:
            try:
                self._attempt(Reader(machine, os.getpid()))
                return
            except MemoryUnreadable as error:
                logger.info("fetch over the network instead reason=%s", error)
        self._attempt(None)

    def _attempt(self, reader: Reader | None) -> None:
        memory, fetch, peers = self._memory, self._fetch, self._peers
        assert memory is not None
        blocks = ArrivingBlocks(memory, fetch, self._guard)
        request = ReadRequest(
            epoch=fetch.source_epoch,
            lease_id=fetch.lease_id,
            token=fetch.token,
            block_ids=blocks.sources,
            rank=peers.rank,
            reader=reader,
        )
        remaining_s = (self._deadline_us - monotonic_us()) / 1e6
        if remaining_s <= 0:
            raise FetchFailed(FetchFailure.TIMED_OUT, "the fetch's time was over")
        self._progress_s = time.monotonic()
        parts = self._parts = peers.connect(fetch.addresses[peers.rank], request, remaining_s)
        if self._guard.is_closed:
            parts.cancel()
        self._transport = ""
        received = iter(parts)
        try:
            for part in received:
                self._progress_s = time.monotonic()
                if part.memory is not None:
                    blocks.read_from(part.memory)
                    self._transport = "process_memory"
                elif part.data:
                    blocks.write(part.data)
                    self._transport = self._transport or "grpc"
                blocks.check(part.digests)
                if blocks.have_arrived:
                    break
            blocks.finish()
            self._rest = received
        finally:
            self._num_bytes = blocks.num_bytes
            if self._rest is not received:
                parts.cancel()

    def _watch(self) -> None:
        """Cancel the call when its source has sent nothing for too long, or its time is over."""
        stall_s = self._peers.stall_s
        while not self._ended.wait(stall_s / 4):
            is_late = monotonic_us() >= self._deadline_us
            self._has_stalled = not is_late and time.monotonic() - self._progress_s > stall_s
            if is_late or self._has_stalled:
                self.stop()


class Transfers:
    """The leases and fetches of one stream of plans.

    `begin` is called on the model thread, `serve` and `collect` on the follow-up thread,
    `begin_fetches` on either, `close` on any.
    """

    def __init__(self, memory: BlockMemory | None, peers: Peers) -> None:
        """memory: None for a model without blocks."""
        self._memory = memory
        self._peers = peers
        self.lease_wait_s = peers.lease_wait_s
        self.leases = None if memory is None else LeaseTable(memory)
        """None if there are no blocks."""
        self._guard = WriteGuard()
        self._threads = FetchThreads()
        self._changed = threading.Condition()
        self._targets: dict[int, set[int]] = {}
        """The targets of fetches whose end was not reported, by id."""
        self._fetches: dict[int, Fetch] = {}
        """Those of them that have begun, by id."""
        self._ended: list[FetchResult] = []

    def begin(self, plan: StepPlan, late: Container[int] = ()) -> None:
        """End and begin leases. Raises InvalidPlan for a lease or fetch that cannot be. late: the
        leases that are served from `serve` on."""
        if self.leases is None:
            if plan.leases or plan.fetches or len(plan.ended_lease_ids):
                raise InvalidPlan("leases", "expected none, as the model has no blocks")
            return
        self._check_targets(plan)
        self.leases.end(plan.ended_lease_ids.tolist())
        for index, lease in enumerate(plan.leases):
            is_served = lease.lease_id not in late
            field = f"leases[{index}]"
            self.leases.begin(lease, field, plan.received_us, is_served=is_served)
        for index, fetch in enumerate(plan.fetches):
            self._check(fetch, f"fetches[{index}]")

    def serve(self, lease_ids: Sequence[int]) -> None:
        """Let others read these leases, whose blocks the device has written."""
        if self.leases is not None:
            self.leases.serve(lease_ids)

    def _check_targets(self, plan: StepPlan) -> None:
        """Raises InvalidPlan if a plan names a block that an earlier one's fetch may write to."""
        with self._changed:
            targets = set().union(*self._targets.values())
        if not targets:
            return
        for field, blocks in _device_blocks(plan):
            for block in targets.intersection(blocks.tolist()):
                raise InvalidPlan(field, f"device block {block} is the target of a fetch")

    def _check(self, fetch: BlockFetch, field: str) -> None:
        assert self._memory is not None
        limit, targets = self._memory.num_device_blocks, fetch.blocks[:, 1]
        if targets.min() < 0 or targets.max() >= limit:
            raise InvalidPlan(f"{field}.blocks", f"expected device blocks below {limit} as targets")
        with self._changed:
            if fetch.fetch_id in self._targets:
                raise InvalidPlan(f"{field}.fetch_id", f"fetch {fetch.fetch_id} has not ended")
            self._targets[fetch.fetch_id] = set(targets.tolist())
        if len(fetch.addresses) != self._peers.world_size:
            expected = f"expected {self._peers.world_size}, one per rank"
            raise InvalidPlan(f"{field}.addresses", f"{expected}, got {len(fetch.addresses)}")

    def begin_fetches(self, plan: StepPlan) -> None:
        """Begin a plan's fetches, once no step or cache operation before it can touch the
        targets."""
        for fetch in plan.fetches:
            assert self._memory is not None
            started = Fetch(
                fetch,
                self._memory,
                self._peers,
                self._guard,
                received_us=plan.received_us,
                on_end=self._end,
            )
            with self._changed:
                self._fetches[fetch.fetch_id] = started
            started.start(self._threads)

    def _end(self, result: FetchResult) -> None:
        with self._changed:
            self._ended.append(result)
            self._changed.notify_all()

    def collect(self) -> tuple[FetchResult, ...]:
        """The fetches that have ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
            for result in ended:
                del self._fetches[result.fetch_id]
                del self._targets[result.fetch_id]
        return tuple(ended)

    def wait_for_end(self, is_needed: Callable[[], bool]) -> None:
        """Wait a moment for the end of a fetch, as long as one is open and a result is not needed
        at once."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._ended) or not self._fetches or is_needed(),
                timeout=MAX_RESULT_DELAY_S,
            )

    def notify(self) -> None:
        """Make `wait_for_end` ask again whether the result is needed."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End all leases and fetches, without waiting for a write that is in progress, and give up
        the connections to others."""
        if self.leases is not None:
            self.leases.end_all()
        self._guard.close()
        with self._changed:
            fetches = list(self._fetches.values())
            self._changed.notify_all()
        for fetch in fetches:
            fetch.stop()
        self._threads.close()
        self._peers.disconnect()

    def wait_closed(self) -> None:
        """Wait until nothing writes to the blocks any more; after `close`."""
        self._guard.wait()


def _device_blocks(plan: StepPlan) -> Iterator[tuple[str, Int32Array]]:
    """The device blocks that a plan names, by field."""
    yield "swap_out", plan.swap_out[:, 0]
    yield "swap_in", plan.swap_in[:, 1]
    yield "copy", plan.copy.ravel()
    yield "block_updates", plan.block_updates[:, 3]
    yield "saved_states", plan.saved_states[:, 3]
    for index, new in enumerate(plan.new_sequences):
        for table in new.tables:
            yield f"new_sequences[{index}].tables", table.block_ids
    for index, lease in enumerate(plan.leases):
        yield f"leases[{index}].block_ids", lease.block_ids
    for index, fetch in enumerate(plan.fetches):
        yield f"fetches[{index}].blocks", fetch.blocks[:, 1]
