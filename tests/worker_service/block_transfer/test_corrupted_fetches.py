"""A fetch whose source, connection or lease is at fault fails, for one of its reasons, or what has
arrived is right; and whatever happens, nothing else is written, and nothing after its end."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from service_common.cluster import NO_CLUSTER, Cluster
from tests.support.peers import TOKEN, keys_of, lease
from tests.support.running_worker import RunningWorker, Steps, running_worker
from tests.support.worker_driver import PlanBuilder, Row
from worker_service.block_transfer import transport
from worker_service.block_transfer.memory import CacheAddresses
from worker_service.block_transfer.transfers import Fetch, FetchThreads, Peers
from worker_service.block_transfer.transport import Part, Parts, ReadRequest, WriteGuard
from worker_service.plan import BlockFetch, FetchFailure, FetchResult, monotonic_us
from worker_service.service import block_connection, wire

NUM_BLOCKS = 6
SOON_S = 60.0

Change = Callable[[Iterator[Part], threading.Event], Iterator[Part]]
"""What happens to the parts of an answer; the event is set when the call is cancelled."""


class Target:
    """A cache of a few blocks more than a fetch has."""

    def __init__(self, block_bytes: int) -> None:
        self.num_device_blocks, self.num_host_blocks = NUM_BLOCKS + 4, 0
        self.block_bytes = block_bytes
        self.bytes = np.full((self.num_device_blocks, block_bytes), 0xEE, np.uint8)
        self.addresses = CacheAddresses(self.bytes.ctypes.data, 0)

    def source(self, block: int) -> memoryview:
        return self.bytes[block].data

    def target(self, block: int) -> memoryview:
        return self.bytes[block].data

    def commit(self, block: int, data: memoryview) -> None:
        """It is there."""


@dataclass
class Faults:
    """What one fault changes of a request and of its answer."""

    expected: set[FetchFailure | None]
    request: Callable[[ReadRequest], ReadRequest] = lambda request: request
    parts: Change = lambda parts, cancelled: parts
    fetch: dict[str, Any] = field(default_factory=dict)
    stall_s: float = SOON_S


@dataclass
class Answer:
    """An answer with a fault on its way."""

    answer: Parts
    change: Change
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[Part]:
        return self.change(iter(self.answer), self.cancelled)

    def cancel(self) -> None:
        self.answer.cancel()
        self.cancelled.set()


def flipped(data: memoryview | bytes, rng: random.Random) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def changing_one(rng: random.Random, name: str) -> Change:
    """Flip a bit of this field of a random part that has it."""

    def change(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
        all_parts = list(parts)
        having = [index for index, part in enumerate(all_parts) if getattr(part, name)]
        if having:
            index = rng.choice(having)
            value = flipped(getattr(all_parts[index], name), rng)
            all_parts[index] = all_parts[index]._replace(**{name: value})
        yield from all_parts

    return change


def truncated(rng: random.Random) -> Change:
    """Leave out the last parts, at least one."""

    def change(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
        all_parts = list(parts)
        yield from all_parts[: rng.randrange(len(all_parts))]

    return change


def swapped(rng: random.Random) -> Change:
    """Exchange the bytes of two blocks, and leave the digests where they were."""

    def change(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
        all_parts = list(parts)
        data = b"".join(part.data for part in all_parts)
        size = len(data) // NUM_BLOCKS
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        first, second = rng.sample(range(NUM_BLOCKS), 2)
        blocks[first], blocks[second] = blocks[second], blocks[first]
        yield Part(data=b"".join(blocks), digests=b"".join(part.digests for part in all_parts))

    return change


def repeated(rng: random.Random) -> Change:
    """Send a part twice."""

    def change(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
        all_parts = list(parts)
        index = rng.randrange(len(all_parts))
        yield from (*all_parts[: index + 1], *all_parts[index:])

    return change


def silent_before(index: int) -> Change:
    """Send nothing from some part on, until the call is cancelled."""

    def change(parts: Iterator[Part], cancelled: threading.Event) -> Iterator[Part]:
        yield from islice(parts, index)
        assert cancelled.wait(SOON_S)
        yield from parts  # raises, as the call has ended

    return change


def elsewhere(**changes: int) -> Change:
    """Send addresses that are not the blocks'."""

    def change(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
        for part in parts:
            if (memory := part.memory) is not None:
                moved = {name: getattr(memory, name) + by for name, by in changes.items()}
                part = part._replace(memory=memory._replace(**moved))
            yield part

    return change


def another_process(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
    """Send another process's probe, which only memory reveals."""
    for part in parts:
        if part.memory is not None:
            part = part._replace(memory=part.memory._replace(probe=bytes(16)))
        yield part


MISMATCH, MALFORMED = {FetchFailure.DIGEST_MISMATCH}, {FetchFailure.MALFORMED}
DENIED = {FetchFailure.DENIED}


def some_fault(rng: random.Random, source: "Source") -> tuple[str, bool, Faults]:
    """A fault, its name, and whether the target may read the source's memory."""
    data: dict[str, Callable[[], Faults]] = {
        "flipped data": lambda: Faults(MISMATCH, parts=changing_one(rng, "data")),
        "swapped blocks": lambda: Faults(MISMATCH, parts=swapped(rng)),
        # Nothing is read after the last part.
        "repeated part": lambda: Faults(MISMATCH | MALFORMED | {None}, parts=repeated(rng)),
    }
    memory: dict[str, Callable[[], Faults]] = {
        "moved address": lambda: Faults(
            MISMATCH, parts=elsewhere(device_address=source.block_bytes)
        ),
        "other size": lambda: Faults(MALFORMED, parts=elsewhere(block_bytes=8)),
        "no such process": lambda: Faults({None}, parts=elsewhere(pid=2**22)),
        "another process": lambda: Faults({None}, parts=another_process),
    }
    both: dict[str, Callable[[], Faults]] = {
        "none": lambda: Faults({None}),
        "flipped digest": lambda: Faults(MISMATCH, parts=changing_one(rng, "digests")),
        "truncated": lambda: Faults(MALFORMED, parts=truncated(rng)),
        "stalled": lambda: Faults(
            {FetchFailure.STALLED}, parts=silent_before(rng.randrange(3)), stall_s=0.08
        ),
        "late": lambda: Faults(
            {FetchFailure.TIMED_OUT},
            parts=silent_before(rng.randrange(3)),
            fetch={"timeout_ms": 20},
            stall_s=0.2,
        ),
        "other key": lambda: Faults(MISMATCH, fetch={"keys": keys_of(NUM_BLOCKS, first=2)}),
        "stale epoch": lambda: Faults(DENIED, fetch={"source_epoch": source.epoch - 1}),
        "foreign lease": lambda: Faults(DENIED, fetch={"lease_id": 2}),
        "foreign token": lambda: Faults(DENIED, fetch={"token": flipped(TOKEN, rng)}),
        "other rank": lambda: Faults(DENIED, request=lambda request: request._replace(rank=1)),
        "block of no lease": lambda: Faults(
            DENIED, request=lambda request: request._replace(block_ids=[0, 9])
        ),
        "fewer blocks": lambda: Faults(
            MALFORMED, request=lambda request: request._replace(block_ids=request.block_ids[:-1])
        ),
        "ended lease": lambda: Faults(
            DENIED | MISMATCH | {None}, parts=source.ending_lease(rng.randrange(4))
        ),
    }
    name = rng.choice([*data, *memory, *both])
    reads_memory = name in memory or (name in both and rng.random() < 0.5)
    return name, reads_memory, (data | memory | both)[name]()


class Source:
    """A worker with `NUM_BLOCKS` leased blocks."""

    epoch = 5

    def __init__(self, worker: RunningWorker, steps: Steps) -> None:
        self.steps = steps
        self.address = str(worker.worker.address)
        stream = worker.worker._engine._stream
        assert stream is not None
        self._transfers = stream.transfers
        self._memory: Any = stream.transfers._memory
        self.block_bytes: int = self._memory.block_bytes
        self.blocks = self.bytes()
        self.connections = block_connection.BlockConnections(Cluster(NO_CLUSTER))
        self._lease = lease(list(range(NUM_BLOCKS)), timeout_ms=2**31 - 1)

    def bytes(self) -> list[bytes]:
        """The leased blocks as they are now."""
        return [bytes(self._memory.source(block)) for block in range(NUM_BLOCKS)]

    def ending_lease(self, index: int) -> Change:
        """End the lease before a part arrives, and write to the blocks, as the next plan may."""

        def change(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
            for number, part in enumerate(parts):
                if number == index:
                    assert self._transfers.leases is not None
                    self._transfers.leases.end([1])
                    for block in range(NUM_BLOCKS):
                        self._memory.target(block)[:] = bytes(self.block_bytes)
                yield part

        return change

    def restore(self) -> None:
        """Make the lease and its blocks what they were."""
        leases = self._transfers.leases
        assert leases is not None
        for block, data in enumerate(self.blocks):
            self._memory.target(block)[:] = data
        if 1 not in leases._leases:
            leases.begin(wire._decode_lease(self._lease, "lease."), "lease", monotonic_us())


@pytest.fixture
async def source(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Source]:
    # The blocks of the tiny model are to take several messages, digests and copies.
    monkeypatch.setattr(block_connection, "CHUNK_BYTES", 100)
    monkeypatch.setattr(block_connection, "DIGESTED_BYTES", 200)
    monkeypatch.setattr(transport, "COPIED_AHEAD_BYTES", 200)
    async with running_worker() as worker:
        engine = worker.worker._engine
        engine._peers = replace(engine._peers, lease_wait_s=0.01)  # many tries are without a lease
        await worker.initialize(Source.epoch)
        steps, plans = Steps(worker.stub), PlanBuilder(epoch=Source.epoch)
        plans.add(1, list(range(NUM_BLOCKS * 4)))
        await steps.send(plans.plan([Row(1, NUM_BLOCKS * 4)]))
        await steps.result()
        yield Source(worker, steps)
        steps.cancel()


def attempt(source: Source, reads_memory: bool, faults: Faults) -> tuple[Target, FetchResult]:
    """The end of a fetch with a fault, and its target."""
    target = Target(source.block_bytes)

    def connect(address: str, request: ReadRequest, timeout_s: float) -> Parts:
        answer = source.connections.connect(address, faults.request(request), timeout_s)
        return Answer(answer, faults.parts)

    pairs = [(block, block + 2) for block in range(NUM_BLOCKS)]
    wanted = BlockFetch(
        fetch_id=1,
        addresses=(source.address,),
        source_epoch=source.epoch,
        lease_id=1,
        token=TOKEN,
        blocks=np.array(pairs, np.int32),
        keys=keys_of(NUM_BLOCKS),
        timeout_ms=60_000,
    )
    wanted = replace(wanted, **faults.fetch)
    results: list[FetchResult] = []
    ended = threading.Event()

    def end(result: FetchResult) -> None:
        results.append(result)
        ended.set()

    peers = Peers(connect=connect, reads_memory=reads_memory, stall_s=faults.stall_s)
    started = Fetch(wanted, target, peers, WriteGuard(), received_us=monotonic_us(), on_end=end)
    threads = FetchThreads()
    started.start(threads)
    assert ended.wait(SOON_S)
    threads.close()
    return target, results[0]


@pytest.mark.parametrize("reads_memory", [True, False])
async def test_a_fetch_ends_when_all_blocks_have_arrived_though_its_call_has_not(
    source: Source, reads_memory: bool
) -> None:
    waiting, released = threading.Event(), threading.Event()

    def open_at_the_end(parts: Iterator[Part], _: threading.Event) -> Iterator[Part]:
        yield from parts
        waiting.set()
        assert released.wait(SOON_S)

    source.restore()
    faults = Faults({None}, parts=open_at_the_end)
    target, result = await asyncio.to_thread(attempt, source, reads_memory, faults)
    assert result.failure is None
    assert [bytes(target.source(block + 2)) for block in range(NUM_BLOCKS)] == source.blocks
    assert await asyncio.to_thread(waiting.wait, SOON_S), (
        "the rest of the call is read, so that its channel is kept"
    )
    released.set()


@pytest.mark.parametrize("num_tries", [250, pytest.param(1000, marks=pytest.mark.long)])
async def test_of_many_corrupted_fetches_none_brings_wrong_blocks(
    source: Source, num_tries: int
) -> None:
    rng = random.Random(7)
    seen: dict[str, set[FetchFailure | None]] = {}
    targets: list[tuple[str, Target, np.ndarray[Any, Any]]] = []
    for number in range(num_tries):
        source.restore()
        name, reads_memory, faults = some_fault(rng, source)
        target, result = await asyncio.to_thread(attempt, source, reads_memory, faults)
        where = f"try {number}, {name}, reads_memory={reads_memory}: {result}"
        assert result.failure in faults.expected, where
        if result.failure is None:
            assert [bytes(target.source(block + 2)) for block in range(NUM_BLOCKS)] == (
                source.blocks
            ), where
        outside = np.delete(target.bytes, range(2, 2 + NUM_BLOCKS), axis=0)
        assert (outside == 0xEE).all(), where
        targets.append((where, target, target.bytes.copy()))
        seen.setdefault(name, set()).add(result.failure)
    assert len(seen) == 20
    for where, target, at_end in targets:
        assert (target.bytes == at_end).all(), f"written to after its end: {where}"
