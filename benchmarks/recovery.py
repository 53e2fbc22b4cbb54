"""Time from the SIGKILL of a process to the next token of each stream that it served.

    python -m benchmarks.recovery --model embedded --kills 30

A core, two frontends and two workers run as processes; the public client reads streams with the
addresses of both frontends. In each round, when every stream has had some tokens, one process is
killed at a random moment. The streams run to their ends, which are compared with an undisturbed
run; only then is a killed worker or frontend started again. A killed core is started at once, as
a supervisor would, so that its start is part of the time.

A token in flight when the process died does not count as a stream's next token: its recovery is
the time from the kill to the end of the longest pause among those that begin soon. Streams that
were not on the killed worker are recognised by their timings, which have no time of recovery.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm
from benchmarks.measuring.tables import publish, script_parser
from pagewire_client import AsyncClient, RequestOutput, SamplingParams
from scheduler_service.core_service.config import CoreServiceConfig
from tests.support.cluster import Cluster
from tools.launch import Service

NUM_WORKERS = 2
NUM_FRONTENDS = 2
NUM_STREAMS = 8
TOKENS_BEFORE_KILL = 16
MAX_TRANSIT_S = 0.05
"""Upper bound of a token's time from the worker to the client."""
BUDGET_S = 2 * CoreServiceConfig().lease_ms / 1000
"""Budget for a lost worker, in addition to the time to recompute its streams: two leases."""

WORKERS = {
    "embedded": ("--dtype", "float32"),
    "simulated": ("--simulate", "--simulate-step-us", "5000"),
}
QUIET = ("--log-level", "warning")
VICTIMS = ("worker", "core", "frontend")
MAX_TOKENS = 200


@dataclass
class Stream:
    """One request, and when its tokens arrived."""

    prompt: list[int]
    params: SamplingParams
    arrivals: list[float] = field(default_factory=list)
    """When responses with tokens arrived, by the monotonic clock."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    output: RequestOutput | None = None

    async def run(self, client: AsyncClient) -> None:
        """Read it to its end."""
        async with client.stream(self.prompt, self.params) as stream:
            async for delta in stream:
                if delta.token_ids:
                    self.arrivals.append(time.monotonic())
                if len(stream.output.outputs[0].token_ids) >= TOKENS_BEFORE_KILL:
                    self.has_begun.set()
            self.output = stream.output

    def recovery_s(self, killed_at: float) -> float:
        """Time from the kill to the end of the pause in which nothing was generated."""
        pauses = [
            (end - start, end)
            for start, end in pairwise(self.arrivals)
            if end > killed_at and start <= killed_at + MAX_TRANSIT_S
        ]
        return max(pauses)[1] - killed_at


def new_streams() -> list[Stream]:
    """The same requests each time."""
    return [
        Stream(
            [10 + number, 20, 30, 40 + number],
            SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=number, ignore_eos=True),
        )
        for number in range(NUM_STREAMS)
    ]


class Rounds:
    """Kills, one after the other, in one deployment."""

    def __init__(self, cluster: Cluster, client: AsyncClient) -> None:
        self._cluster = cluster
        self._client = client
        self._draw = random.Random(0)
        self._undisturbed: list[list[int]] = []

    async def run(self, victim: str, num_kills: int) -> dict[str, object]:
        """One line of the table."""
        load = ForeignLoad()
        self._undisturbed = await self._answers(new_streams())
        recoveries: list[float] = []
        for number in range(num_kills):
            found: list[float] = []
            while not found:  # on a busy machine a kill may come after the end of all streams
                found = await self._kill_once(victim, number % NUM_FRONTENDS)
            recoveries += found
        return {
            "victim": victim,
            "kills": num_kills,
            "streams": len(recoveries),
            "p50_ms": round(1000 * median(recoveries), 1),
            "p99_ms": round(1000 * float(np.percentile(recoveries, 99)), 1),
            "max_ms": round(1000 * max(recoveries), 1),
            "foreign_cores": load.cores,
        }

    async def _kill_once(self, victim: str, index: int) -> list[float]:
        """The recoveries, in seconds, of the streams that the process carried: the core, the
        frontend with this index, or the worker that has run for longest."""
        await wait_whole(self._cluster)
        streams = new_streams()
        answers = asyncio.create_task(self._answers(streams))
        for stream in streams:
            await stream.has_begun.wait()
        await asyncio.sleep(self._draw.uniform(0, 0.05))
        killed_at = time.monotonic()
        self._process(victim, index).kill()
        if victim == "core":
            self._cluster.start_core()
        assert await answers == self._undisturbed, f"other tokens after the death of a {victim}"
        if victim == "frontend":
            self._cluster.restart_frontend(index)
        elif victim == "worker":
            self._cluster.start_worker()
        return [s.recovery_s(killed_at) for s in streams if _was_hit(s, victim, killed_at)]

    def _process(self, victim: str, index: int) -> Service:
        core = self._cluster.core
        assert core is not None
        if victim == "frontend":
            return self._cluster.frontends[index]
        return core if victim == "core" else self._cluster.workers[-NUM_WORKERS]

    async def _answers(self, streams: Sequence[Stream]) -> list[list[int]]:
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(self._client))
        return [s.output.outputs[0].token_ids for s in streams if s.output is not None]


def _was_hit(stream: Stream, victim: str, killed_at: float) -> bool:
    """Whether the process served a stream that had not ended."""
    assert stream.output is not None
    assert stream.output.timings is not None
    if stream.arrivals[-1] <= killed_at:
        return False
    return victim != "worker" or stream.output.timings.recovery_us > 0


async def wait_whole(cluster: Cluster) -> None:
    """Wait until every frontend serves and every worker is ready."""
    await asyncio.to_thread(cluster.wait_serving)
    await asyncio.to_thread(cluster.wait_num_ready, NUM_WORKERS)


async def measure(model: str, victims: Sequence[str], num_kills: int) -> list[dict[str, object]]:
    """A line for each kind of process."""
    rows: list[dict[str, object]] = []
    with (
        TemporaryDirectory(prefix="pagewire-") as folder,
        Cluster(
            Path(folder),
            worker_flags=[*WORKERS[model], *QUIET],
            core_flags=QUIET,
            frontend_flags=QUIET,
        ) as cluster,
    ):
        cluster.start(num_workers=NUM_WORKERS, num_frontends=NUM_FRONTENDS)
        await wait_whole(cluster)
        addresses = [cluster.frontend_address(index) for index in range(NUM_FRONTENDS)]
        for victim in victims:
            # After the death of a frontend a client uses another address; a new client for each
            # victim begins with the first.
            async with AsyncClient(addresses) as client:
                rows.append(await Rounds(cluster, client).run(victim, num_kills))
                print(rows[-1], flush=True)
    return rows


COLUMNS = {
    "victim": "killed",
    "kills": "times",
    "streams": "streams",
    "p50_ms": "next token p50, ms",
    "p99_ms": "p99, ms",
    "max_ms": "longest, ms",
    "foreign_cores": "others used, cores",
}
"""Titles by the names in a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of each kind of process")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--model", choices=list(WORKERS), default="embedded")
    args = parser.parse_args(arguments)
    if args.kills < 1:
        parser.error("expected at least one kill")
    exit_on_sigterm()
    load = ForeignLoad()
    rows = asyncio.run(measure(args.model, args.victims, args.kills))
    facts = (
        f"{NUM_STREAMS} streams at a time. The budget for a worker: {1000 * BUDGET_S:.0f} ms, two "
        "leases, and the time to compute again what its streams had."
    )
    publish(f"recovery_{args.model}", facts, COLUMNS, rows, load.cores, args.results)


if __name__ == "__main__":
    main()
