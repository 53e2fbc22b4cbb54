"""Growth of memory with the number of requests served.

    python -m benchmarks.endurance --requests 100000

A core, a frontend and two simulated workers run as processes, with default settings but for a
cache small enough to be full all the time. The public client sends short requests in rounds, each
on a `GenerateMany` stream of its own: distinct prompts, some with a common prefix, some for two
choices; in addition, streams that are cancelled after their first token. After each round, the
resident memory of every process is recorded. The slope of a line fitted to it, from a fifth of the
requests on, is the memory that a finished request leaves behind.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import print_table, script_parser
from pagewire_cli.local.services import LocalServices
from pagewire_client import AsyncClient, SamplingParams

NUM_WORKERS = 2
VOCAB_SIZE = 32_000
CANCELLED_PER_ROUND = 10
SETTLED_SHARE = 0.2
"""Share of the requests during which caches and allocators may still grow."""

FLAGS = {
    "simulate": True,
    "simulate_vocab_size": VOCAB_SIZE,
    "simulate_gpu_blocks": 1024,
    "max_model_len": 256,
    "log_level": "warning",
}
STEM = list(range(100, 148))
"""Prefix of every eighth prompt."""


COLUMNS = {
    "process": "process",
    "rss_mib_at_a_fifth": "MiB at a fifth",
    "rss_mib_at_the_end": "MiB at the end",
    "bytes_per_request": "bytes per request",
}


@dataclass
class Memory:
    """Resident memory of one process after each round."""

    name: str
    pid: int
    finished: list[int] = field(default_factory=list)
    """Requests that had finished."""
    rss_bytes: list[int] = field(default_factory=list)

    def note(self, num_finished: int) -> None:
        """Add a sample."""
        self.finished.append(num_finished)
        self.rss_bytes.append(psutil.Process(self.pid).memory_info().rss)

    def settled(self) -> tuple[list[int], list[int]]:
        """The samples from a fifth of the requests on."""
        first = next(
            i for i, n in enumerate(self.finished) if n >= SETTLED_SHARE * self.finished[-1]
        )
        return self.finished[first:], self.rss_bytes[first:]

    @property
    def bytes_per_request(self) -> float:
        """Slope of the line fitted to the settled samples."""
        finished, rss = self.settled()
        slope, _ = np.polyfit(finished, rss, 1)
        return float(slope)


class Traffic:
    """Short requests, the same ones in every run."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._draw = random.Random(0)

    async def round(self, num_requests: int) -> None:
        """Run `num_requests` requests to their ends, and cancel some more."""
        prompts = [self._prompt() for _ in range(num_requests)]
        params = [self._params() for _ in range(num_requests)]
        batch = self._client.generate_many(prompts, params)
        cancelled = [self._cancel() for _ in range(CANCELLED_PER_ROUND)]
        outputs, *_ = await asyncio.gather(batch, *cancelled)
        for output, asked in zip(outputs, params, strict=True):
            lengths = [len(choice.token_ids) for choice in output.outputs]
            assert lengths == [asked.max_tokens] * (asked.n or 1), "an answer is not complete"

    async def _cancel(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        async with self._client.stream(self._prompt(), params) as stream:
            async for _ in stream:
                return

    def _prompt(self) -> list[int]:
        length = self._draw.randint(4, 24)
        own = [self._draw.randrange(10, VOCAB_SIZE) for _ in range(length)]
        return STEM + own if self._draw.random() < 1 / 8 else own

    def _params(self) -> SamplingParams:
        return SamplingParams(
            n=2 if self._draw.random() < 1 / 16 else 1,
            max_tokens=self._draw.randint(1, 8),
            seed=self._draw.getrandbits(32),
            ignore_eos=True,
        )


async def run(num_requests: int, num_rounds: int) -> tuple[list[Memory], float]:
    """Return the memory of all services, and the requests per second that they served."""
    with LocalServices("simulated", engine_flags=FLAGS, num_workers=NUM_WORKERS) as services:
        services.start(timeout_s=60)
        memories = [
            Memory(process.name, process.pid) for process in services.processes if process.pid
        ]
        async with AsyncClient(services.addresses[0]) as client:
            traffic = Traffic(client)
            start = time.monotonic()
            for number in range(1, num_rounds + 1):
                await traffic.round(num_requests // num_rounds)
                for memory in memories:
                    memory.note(number * (num_requests // num_rounds))
            rate = memories[0].finished[-1] / (time.monotonic() - start)
        for memory, process in zip(memories, services.processes, strict=True):
            assert process.pid == memory.pid, f"{memory.name} was restarted"
    return memories, rate


def rows(memories: Sequence[Memory]) -> list[dict[str, object]]:
    """One row per process."""
    lines: list[dict[str, object]] = []
    for memory in memories:
        _, rss = memory.settled()
        lines.append(
            {
                "process": memory.name,
                "rss_mib_at_a_fifth": round(rss[0] / 2**20, 1),
                "rss_mib_at_the_end": round(rss[-1] / 2**20, 1),
                "bytes_per_request": round(memory.bytes_per_request, 2),
                "rss_mib": [round(rss / 2**20, 2) for rss in memory.rss_bytes],
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args(arguments)
    if args.requests < args.rounds or args.rounds < 5:
        parser.error("expected at least 5 rounds, and a request for each")
    load = ForeignLoad()
    memories, rate = asyncio.run(run(args.requests, args.rounds))
    num_finished = memories[0].finished[-1]
    lines = rows(memories)
    title = f"resident memory over {num_finished} requests, {rate:.0f} a second"
    print_table(lines, title, COLUMNS, width=100)
    figures = {"requests": num_finished, "requests_per_s": round(rate), "processes": lines}
    save("endurance", figures, load.cores, args.results)


if __name__ == "__main__":
    main()
