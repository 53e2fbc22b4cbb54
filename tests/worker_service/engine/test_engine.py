"""What the engine remembers for the core that comes after this one."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.counting_model import loaded_counting_model
from tests.support.peers import NO_PEERS
from worker_service.address import TcpAddress
from worker_service.config import CacheConfig
from worker_service.distributed.communicator import Communicator, EpochRendezvous, Rendezvous
from worker_service.distributed.layout import Layout
from worker_service.engine.engine import Engine
from worker_service.engine.executor import BlockCounts
from worker_service.errors import (
    GroupBroken,
    OutOfMemory,
    OutOfOrder,
    ProfilingFailed,
    StaleEpoch,
)
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.torch_executor import Profiler, TorchExecutor


class CountingExecutor(TorchExecutor):
    """Counts how often memory is measured, and remembers for which epochs there were runners."""

    def __init__(self) -> None:
        super().__init__(
            CacheConfig(block_size=4),
            Profiler(Path()),
            lambda: loaded_counting_model(None, block_size=4),
        )
        self.num_profiles = 0
        self.failure: Exception | None = None
        self.epochs: list[int] = []

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        self.num_profiles += 1
        if self.failure is not None:
            raise self.failure
        return super().profile_blocks(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> ModelRunner:
        self.epochs.append(epoch)
        return super().make_runner(num_gpu_blocks, num_cpu_blocks, epoch)


async def test_memory_is_measured_once_for_each_size_of_batch() -> None:
    executor = CountingExecutor()
    engine = Engine(executor, NO_PEERS)
    await engine.model.load()
    try:
        counts = [(await engine.profile_blocks(n, 64)).num_gpu_blocks for n in (3, 3, 4, 3)]
    finally:
        engine.stop()
    assert counts == [192, 192, 256, 192]
    assert executor.num_profiles == 2


async def test_memory_is_measured_once_even_if_the_call_does_not_wait_for_it() -> None:
    """As when it takes longer than the core waits: the next call must not begin again."""
    executor = CountingExecutor()
    engine = Engine(executor, NO_PEERS)
    await engine.model.load()
    try:
        may_measure = threading.Event()
        engine.model.thread.post(lambda: may_measure.wait() and None)
        impatient = asyncio.create_task(engine.profile_blocks(3, 64))
        await asyncio.sleep(0)  # it is queued
        impatient.cancel()
        patient = asyncio.create_task(engine.profile_blocks(3, 64))
        await asyncio.sleep(0)
        may_measure.set()
        counts = await patient
    finally:
        engine.stop()
    assert counts.num_gpu_blocks == 192
    assert executor.num_profiles == 1
    assert impatient.cancelled()


async def test_a_batch_that_cannot_be_computed_is_an_error_that_says_why() -> None:
    executor = CountingExecutor()
    engine = Engine(executor, NO_PEERS)
    await engine.model.load()
    executor.failure = TypeError("failed to specialize an argument\nand more")
    says = "^the largest batch cannot be computed: TypeError: failed to specialize an argument$"
    try:
        with pytest.raises(ProfilingFailed, match=says):
            await engine.profile_blocks(3, 64)
        executor.failure = OutOfMemory("no room")
        with pytest.raises(OutOfMemory):
            await engine.profile_blocks(3, 64)
    finally:
        engine.stop()


async def test_nothing_is_made_for_an_epoch_that_another_has_taken_over_meanwhile() -> None:
    """A rank would wait for others that are at the newer one already."""
    executor = CountingExecutor()
    engine = Engine(executor, NO_PEERS)
    await engine.model.load()
    may_go_on = threading.Event()

    def be_at_something() -> None:
        may_go_on.wait(60)

    try:
        engine.model.thread.post(be_at_something)
        older = asyncio.create_task(engine.initialize_cache(4, 0, epoch=1))
        newer = asyncio.create_task(engine.initialize_cache(4, 0, epoch=2))
        await asyncio.sleep(0)
        assert engine.last_epoch == 2
        may_go_on.set()
        with pytest.raises(StaleEpoch):
            await older
        await newer
    finally:
        may_go_on.set()
        engine.stop()
    assert executor.epochs == [2]


class PausedExecutor(TorchExecutor):
    """Begins to make a runner when the test says so."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.begins, self.may_begin = threading.Event(), threading.Event()

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> ModelRunner:
        self.begins.set()
        assert self.may_begin.wait(60)
        return super().make_runner(num_gpu_blocks, num_cpu_blocks, epoch)


@asynccontextmanager
async def overtaken(
    executor: PausedExecutor,
) -> AsyncIterator[tuple[Engine, asyncio.Task[None], asyncio.Task[None]]]:
    """An engine that is about to make the caches of epoch 1 when epoch 2 asks for its own; what
    makes those of both."""
    engine = Engine(executor, NO_PEERS)
    await engine.model.load()
    try:
        older = asyncio.create_task(engine.initialize_cache(4, 0, epoch=1))
        assert await asyncio.to_thread(executor.begins.wait, 60)
        newer = asyncio.create_task(engine.initialize_cache(6, 0, epoch=2))
        await asyncio.sleep(0)
        assert engine.last_epoch == 2
        yield engine, older, newer
    finally:
        executor.may_begin.set()
        engine.stop()


class FullExecutor(PausedExecutor, CountingExecutor):
    """Has no room for the caches of epoch 2."""

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> ModelRunner:
        if epoch == 2:
            raise OutOfMemory("no room")
        return super().make_runner(num_gpu_blocks, num_cpu_blocks, epoch)


async def test_an_epoch_does_not_get_the_caches_of_one_that_it_has_taken_over() -> None:
    executor = FullExecutor()
    async with overtaken(executor) as (engine, older, newer):
        executor.may_begin.set()
        with pytest.raises(StaleEpoch):
            await older
        with pytest.raises(OutOfMemory):
            await newer
        with pytest.raises(OutOfOrder, match="no cache"):
            engine.open_stream(2)


TWO = Layout(tensor_parallel_size=2)


class Unmet(Rendezvous):
    """Where no rank may look for others."""

    def meet(self, epoch: int, cancelled: threading.Event) -> EpochRendezvous:
        raise AssertionError(f"epoch {epoch} has ended")


class RankExecutor(PausedExecutor):
    """One of two ranks."""

    def __init__(self) -> None:
        alone = loaded_counting_model(None, block_size=4)
        loaded = replace(alone, communicator=Communicator(TWO))
        rendezvous = Unmet(TcpAddress("127.0.0.1", 1), TWO)
        super().__init__(CacheConfig(block_size=4), Profiler(Path()), lambda: loaded, rendezvous)


async def test_a_rank_does_not_wait_for_others_of_an_epoch_that_ends_as_it_begins_to() -> None:
    """Another core takes over once the epoch was found to be the newest one."""
    executor = RankExecutor()
    async with overtaken(executor) as (engine, older, newer):
        engine.close_any_stream()
        executor.may_begin.set()
        for joining in (older, newer):
            with pytest.raises(GroupBroken, match="epoch has ended"):
                await joining
