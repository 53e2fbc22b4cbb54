"""Cost of status watchers for the scheduler core: the share of its event loop.

    python -m benchmarks.status_watchers --groups 16 --blocks 30000 --watchers 32

Each watcher requests the status with requests and blocks ten times a second. Groups are kept busy
by a bare frontend, so that block maps are full. Rounds with and without watchers alternate in one
run; the processor time is that of the core's main thread, which runs its loop and nothing else. The
core bounds the cost of watchers and sends them fewer statuses than they request: statuses per
watcher and second are in the table.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from statistics import median

import grpc

from benchmarks.core_and_workers import MODEL, BareFrontend, CoreAndWorkers
from benchmarks.tables import print_table
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from service_common.grpc_options import channel_options

INTERVAL_MS = 100


class Watchers:
    """An asynchronous context manager: `number` calls of WatchStatus, each on its own channel."""

    def __init__(self, core_address: str, number: int) -> None:
        self.num_statuses = 0
        self.num_bytes = 0
        """Size of one status."""
        self._core_address = core_address
        self._number = number
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Watchers":
        self._tasks = [asyncio.create_task(self._watch()) for _ in range(self._number)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        detail = status_pb2.StatusDetail(include_requests=True, include_blocks=True)
        request = pb.SchedulerServiceWatchStatusRequest(detail=detail, interval_ms=INTERVAL_MS)
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._core_address, options=options) as channel:
            async for response in SchedulerServiceStub(channel).WatchStatus(request):
                self.num_statuses += 1
                self.num_bytes = response.ByteSize()


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """A line for each round, without watchers and with them in turns."""
    rows = []
    services = CoreAndWorkers(
        step_us=args.step_us,
        max_num_seqs=args.rows,
        checks_plans=False,
        num_gpu_blocks=args.blocks,
    )
    async with services:
        await services.grow(args.groups)
        frontend = BareFrontend(
            services.core_address, MODEL, prompt_tokens=256, output_tokens=args.output_tokens
        )
        async with frontend:
            num_open = args.groups * args.rows
            frontend.keep_open(num_open)
            await frontend.run_until_finished(num_open)
            for index in range(2 * args.rounds):
                number = args.watchers if index % 2 else 0
                async with Watchers(services.core_address, number) as watchers:
                    before = time.monotonic(), services.core_loop_seconds(), frontend.num_tokens
                    await frontend.run(args.seconds)
                    seconds = time.monotonic() - before[0]
                    rows.append(
                        {
                            "watchers": number,
                            "loop_share": (services.core_loop_seconds() - before[1]) / seconds,
                            "tokens_per_s": (frontend.num_tokens - before[2]) / seconds,
                            "statuses_per_s": watchers.num_statuses / seconds / max(1, number),
                            "status_mb": watchers.num_bytes / 1e6,
                        }
                    )
    return rows


def cost(rows: Sequence[dict[str, float]]) -> float:
    """Share of the loop that the watchers cost: the median with them less that without."""
    shares: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        shares[row["watchers"] > 0].append(row["loop_share"])
    return median(shares[True]) - median(shares[False])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rounds and the watchers' share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=30_000, help="device blocks of each group")
    parser.add_argument("--watchers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16, help="sequences in each group's batch")
    parser.add_argument("--step-us", type=int, default=100_000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="with watchers, and as many without")
    rows = asyncio.run(measure(parser.parse_args(arguments)))
    print_table(rows, "rounds with and without watchers", cell=lambda value: f"{value:.4g}")
    print(f"watchers cost {100 * cost(rows):.2f} % of the core's loop")


if __name__ == "__main__":
    main()
