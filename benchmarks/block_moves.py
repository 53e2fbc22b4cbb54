"""How fast blocks of KV move between two workers of one machine, against copies within one.

    python -m benchmarks.block_moves [--num-blocks 256] [--repeats 5]

The source is a worker in a process of its own, the target a fetch in this one, as in a worker, with
blocks of a model's size. The limit is the bandwidth of copies by one thread of this process, from
one cache to another. `grpc` and `process_memory` are fetches, with the digests at both ends;
`process_memory copy` is the transport alone, and `digest` one digest of all bytes. Prints the best
of the repetitions, which are interleaved.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch

from benchmarks import machine
from pagewire.columns import pack
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from service_common.cluster import NO_CLUSTER, Cluster
from service_common.grpc_options import channel_options
from worker_service.block_transfer.memory import block_digest
from worker_service.block_transfer.process_memory import Piece, machine_name, read_memory
from worker_service.block_transfer.transfers import Fetch, Peers
from worker_service.block_transfer.transport import Reader, ReadRequest, SourceMemory, WriteGuard
from worker_service.config import CacheConfig, NetworkConfig, SimulationConfig, WorkerConfig
from worker_service.engine.executor import FinishedStep
from worker_service.kv_cache.block_memory import CacheMemory
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.plan import (
    KEY_BYTES,
    BlockFetch,
    FetchResult,
    StepPlan,
    StepResult,
    StepTimings,
    monotonic_us,
)
from worker_service.service.block_connection import BlockConnections
from worker_service.service.lifecycle import make_worker
from worker_service.simulated.executor import SimulatedExecutor, SimulatedRunner

BLOCK_SIZE = 16
SPEC = KVCacheSpec.uniform(num_layers=28, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
"""Of Qwen3-0.6B."""

TOKEN = bytes(KEY_BYTES)
COPIED_AT_ONCE = 4
"""Blocks, as in a fetch."""

_NO_TIMES = StepTimings(
    received_us=0, started_us=0, finished_us=0, cache_ops_us=0, forward_us=0, sample_us=0
)


def make_cache(num_blocks: int) -> CacheEngine:
    """A cache whose pages are all allocated, of random bytes."""
    cache = CacheEngine(
        SPEC,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=0,
        device=torch.device("cpu"),
    )
    seed = torch.randint(256, cache.device_cache[0].shape, dtype=torch.uint8)
    for number, block in enumerate(cache.device_cache):
        torch.add(seed, number % 256, out=block)
    return cache


class _Runner(SimulatedRunner):
    """Executes nothing, over the cache of a model."""

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Nothing."""
        tokens = np.zeros(0, np.int32)
        return FinishedStep(
            StepResult(epoch=plan.epoch, step_id=plan.step_id, token_ids=tokens, timings=_NO_TIMES)
        )


class _Executor(SimulatedExecutor):
    """Makes such runners."""

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> SimulatedRunner:
        """One over a new cache."""
        runner = _Runner(
            self._config, groups=self._groups, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=0
        )
        runner.block_memory = CacheMemory(make_cache(num_gpu_blocks))  # type: ignore[assignment]
        return runner


def serve(num_blocks: int, connection: Connection) -> None:
    """A worker that leases all its blocks; sends its address, and ends when asked to."""
    asyncio.run(_serve(num_blocks, connection))


async def _serve(num_blocks: int, connection: Connection) -> None:
    model = SimulationConfig(num_gpu_blocks=num_blocks)
    config = WorkerConfig(
        model=model,
        cache=CacheConfig(block_size=BLOCK_SIZE),
        network=NetworkConfig(listen="127.0.0.1:0"),
    )
    worker = make_worker(config, _Executor(model, BLOCK_SIZE))
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    async with grpc.aio.insecure_channel(worker.address, options=channel_options()) as channel:
        stub = WorkerServiceStub(channel)
        await stub.InitializeCache(pb.InitializeCacheRequest(num_gpu_blocks=num_blocks, epoch=1))
        steps = stub.ExecuteSteps()
        lease = plan_pb2.BlockLease(
            lease_id=1,
            token=TOKEN,
            block_ids=pack(range(num_blocks)),
            keys=_keys(num_blocks),
            timeout_ms=2**31,
        )
        plan = plan_pb2.StepPlan(epoch=1, step_id=1, leases=[lease])
        await steps.write(pb.ExecuteStepsRequest(plans=[plan]))
        await steps.read()
        connection.send(worker.address)
        await asyncio.to_thread(connection.recv)
        steps.cancel()
    worker.end_at_once()
    await task


def _keys(count: int) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(count))


def fetch(address: str, target: CacheMemory, peers: Peers) -> FetchResult:
    """Fetch all blocks."""
    blocks = np.arange(target.num_device_blocks, dtype=np.int32)
    wanted = BlockFetch(
        fetch_id=1,
        addresses=(address,),
        source_epoch=1,
        lease_id=1,
        token=TOKEN,
        blocks=np.stack([blocks, blocks], axis=1),
        keys=_keys(len(blocks)),
        timeout_ms=600_000,
    )
    results: list[FetchResult] = []
    ended = threading.Event()

    def end(result: FetchResult) -> None:
        results.append(result)
        ended.set()

    guard = WriteGuard()
    Fetch(wanted, target, peers, guard, received_us=monotonic_us(), on_end=end).start()
    ended.wait()
    assert results[0].failure is None, results[0]
    return results[0]


def locate(address: str, peers: Peers) -> SourceMemory:
    """Where the source's blocks are in its memory."""
    reader = Reader(machine_name(), os.getpid())
    request = ReadRequest(1, 1, TOKEN, block_ids=[0], rank=0, reader=reader)
    parts = peers.connect(address, request, 60.0)
    memory = next(iter(parts)).memory
    parts.cancel()
    assert memory is not None, "expected a system that permits to read another process's memory"
    return memory


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-blocks", type=int, default=256, help="blocks of 1.75 MiB")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    source = context.Process(target=serve, args=(args.num_blocks, theirs))
    source.start()
    cache = make_cache(args.num_blocks)
    target, other = CacheMemory(cache), make_cache(args.num_blocks).device_cache
    num_bytes = cache.device_cache.nbytes
    address = ours.recv()
    peers = Peers(connect=BlockConnections(Cluster(NO_CLUSTER)).connect)

    where = locate(address, peers)

    def copy() -> None:
        for first, second in zip(other, cache.device_cache, strict=True):
            second.copy_(first)

    def digest() -> None:
        for number in range(args.num_blocks):
            block_digest(TOKEN, target.source(number))

    def read() -> None:
        """Copy the blocks from the source's memory, without digests."""
        for start in range(0, args.num_blocks, COPIED_AT_ONCE):
            numbers = range(start, min(start + COPIED_AT_ONCE, args.num_blocks))
            pieces = [
                Piece(where.device_address + number * where.block_bytes, target.target(number))
                for number in numbers
            ]
            read_memory(where.pid, pieces)

    def over(transport: str, peers: Peers) -> Callable[[], None]:
        def run() -> None:
            cache.device_cache.zero_()
            result = fetch(address, target, peers)
            assert result.transport == transport, result
            durations[transport].append(result.duration_us / 1e6)

        return run

    durations: dict[str, list[float]] = {
        name: [] for name in ("copy", "process_memory copy", "digest", "grpc", "process_memory")
    }

    def timed(name: str, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        durations[name].append(time.perf_counter() - started)

    streams = over("grpc", replace(peers, reads_memory=False))
    memory = over("process_memory", peers)
    for _ in range(args.repeats):
        timed("copy", copy)
        timed("process_memory copy", read)
        timed("digest", digest)
        streams()
        memory()
    ours.send(None)
    source.join()
    rates = {name: round(num_bytes / min(times) / 1e9, 2) for name, times in durations.items()}
    print(
        json.dumps(
            {
                "machine": machine.describe(),
                "num_bytes": num_bytes,
                "block_bytes": target.block_bytes,
                "gb_per_s": rates,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
