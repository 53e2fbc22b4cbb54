"""What is computed again, and how long streams pause, when requests change their worker or core.

    python -m benchmarks.moving

Each case starts a core, a frontend and a worker with random weights, and makes streams. *drain*:
another worker joins, and the first one is drained. *core killed*: the core is killed and started
again at once. *prefix elsewhere*: prompts begin with tokens that one worker has computed, which has
no place left, and go to another; their time to the first token is compared with that of prompts
that nobody has computed. *two for both* and *one for each*: long prompts arrive, one after the
other, while streams generate on two workers, which either compute prompts and generate, or do one
each. *hand-over*: one worker computes prompts, one after the other, and another one generates; the
time between their first and second tokens is compared with a limit: 1.5 times the time of copying
as many bytes in memory, 5 ms, and the step itself.

*Computed again*: tokens that prefills computed after the event, or besides the prompts' new ones. A
pause is the longest time between two tokens of a stream after the event.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm
from benchmarks.measuring.tables import publish, script_parser
from benchmarks.models.checkpoints import checkpoint
from benchmarks.models.model_shapes import SHAPES
from pagewire_client import AsyncClient, SamplingParams
from tests.support.cluster import Cluster

SHAPE = replace(SHAPES["llama-160m"], name="llama-160m-8k", max_position_embeddings=8192)
DTYPE = "bfloat16"
BEFORE_EVENT = 8
"""Tokens of every stream before something happens."""
AFTER_EVENT = 32
NUM_LONG_PROMPTS = 8
PLACES = 64
"""Of each worker."""

QUIET = ("--log-level", "warning")
CORE = ("--max-num-seqs", str(PLACES), *QUIET)
WORKER = ("--dtype", DTYPE, "--threads", "1", "--kv-cache-memory", "6GiB", *QUIET)


@dataclass
class Stream:
    """One request, and when its tokens arrived."""

    prompt: list[int]
    max_tokens: int
    arrivals: list[float] = field(default_factory=list)
    """By the monotonic clock."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted_at: float | None = None
    """It is read up to a number of tokens after this."""

    async def run(self, client: AsyncClient) -> None:
        """Read its tokens."""
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0, ignore_eos=True)
        async with client.stream(self.prompt, params) as stream:
            async for delta in stream:
                self.arrivals += [time.monotonic()] * len(delta.token_ids)
                if len(self.arrivals) >= min(BEFORE_EVENT, self.max_tokens):
                    self.has_begun.set()
                if self._num_after_interruption() >= AFTER_EVENT:
                    break

    def _num_after_interruption(self) -> int:
        since = self.interrupted_at
        return 0 if since is None else sum(at > since for at in self.arrivals[-AFTER_EVENT:])

    def gaps(self, *, after: bool) -> list[float]:
        """The times between two tokens, of which the second one came before or after the
        interruption."""
        assert self.interrupted_at is not None
        pairs, at = pairwise(self.arrivals), self.interrupted_at
        return [end - start for start, end in pairs if (end > at) is after]


class Deployment:
    """A core, a frontend and workers, and a client."""

    def __init__(
        self, cluster: Cluster, client: AsyncClient, roles: tuple[str, str] = ("both", "both")
    ) -> None:
        self.cluster, self.client, self.roles = cluster, client, roles
        self._draw = Random(0)

    def prompt(self, num_tokens: int, beginning: Sequence[int] = ()) -> list[int]:
        """A prompt of this length that continues `beginning` at random."""
        count = num_tokens - len(beginning)
        return [*beginning, *(self._draw.randrange(10, SHAPE.vocab_size) for _ in range(count))]

    async def add_worker(self, *flags: str) -> None:
        """Start a worker, and wait until it is ready."""
        self.cluster.start_worker(*flags)
        await asyncio.to_thread(self.cluster.wait_num_ready, len(self.cluster.workers))

    async def num_prefilled(self) -> int:
        """Tokens that prefills have computed since the core's start."""
        return (await self.client.get_status()).num_prefill_tokens

    async def interrupted(
        self, num_streams: int, num_tokens: int, interrupt: Callable[[], Awaitable[int]]
    ) -> dict[str, object]:
        """A line of the table: streams of prompts of this length run, and something interrupts
        them, which returns how many tokens prefills had computed before."""
        most = SHAPE.max_position_embeddings - num_tokens
        streams = [Stream(self.prompt(num_tokens), most) for _ in range(num_streams)]
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(self.client))
            for stream in streams:
                await stream.has_begun.wait()
            num_before = await interrupt()
            for stream in streams:
                stream.interrupted_at = time.monotonic()
        pauses = [max(stream.gaps(after=True)) for stream in streams]
        usual = median(median(stream.gaps(after=False)) for stream in streams)
        return {
            "streams": num_streams,
            "tokens": num_tokens,
            "computed_again": await self.num_prefilled() - num_before,
            "pause_p50_ms": round(1000 * median(pauses)),
            "pause_max_ms": round(1000 * max(pauses)),
            "usual_ms": round(1000 * usual),
        }

    async def drain(self, num_streams: int, num_tokens: int) -> dict[str, object]:
        """All streams run on one worker, which is drained when another one has joined."""

        async def end_first_worker() -> int:
            await self.add_worker()
            num_before = await self.num_prefilled()
            self.cluster.workers[0].process.terminate()
            return num_before

        return await self.interrupted(num_streams, num_tokens, end_first_worker)

    async def kill_core(self, num_streams: int, num_tokens: int) -> dict[str, object]:
        """The core is killed, and started again at once."""

        async def restart() -> int:
            assert self.cluster.core is not None
            self.cluster.core.kill()
            self.cluster.start_core()
            return 0

        return await self.interrupted(num_streams, num_tokens, restart)

    async def reuse(self, num_streams: int, num_tokens: int) -> dict[str, object]:
        """Prompts, one after the other, begin with what a worker has computed that has no place
        left, and go to another one; every second prompt with what nobody has computed."""
        known = [self.prompt(num_tokens) for _ in range(num_streams)]
        for prompt in known:
            await Stream(prompt, 1).run(self.client)
        length = num_tokens + 32
        async with asyncio.TaskGroup() as tasks:
            others = [Stream(self.prompt(16), 4_000) for _ in range(PLACES)]
            readers = [tasks.create_task(other.run(self.client)) for other in others]
            for other in others:
                await other.has_begun.wait()
            await self.add_worker()
            num_before = await self.num_prefilled()
            found: list[float] = []
            computed: list[float] = []
            for prompt in known:
                found.append(await self._first_token_s(self.prompt(length, prompt)))
                computed.append(await self._first_token_s(self.prompt(length)))
            num_again = await self.num_prefilled() - num_before - num_streams * (length + 32)
            for reader in readers:
                reader.cancel()
        return {
            "streams": num_streams,
            "tokens": num_tokens,
            "computed_again": num_again,
            "first_token_ms": round(1000 * median(found)),
            "ratio": round(median(found) / median(computed), 2),
        }

    async def mix(self, num_streams: int, num_tokens: int) -> dict[str, object]:
        """Streams generate while prompts of this length arrive one after the other."""
        await self.add_worker("--role", self.roles[1])
        streams = [Stream(self.prompt(32), 4_000) for _ in range(num_streams)]
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(self.client))
            for stream in streams:
                await stream.has_begun.wait()
            begun_at = time.monotonic()
            num_tokens_before = sum(len(stream.arrivals) for stream in streams)
            for _ in range(NUM_LONG_PROMPTS):
                await Stream(self.prompt(num_tokens), 16).run(self.client)
            elapsed_s = time.monotonic() - begun_at
            num_generated = sum(len(stream.arrivals) for stream in streams) - num_tokens_before
            for stream in streams:
                stream.interrupted_at = begun_at
        gaps = [gap for stream in streams for gap in stream.gaps(after=True)]
        return {
            "streams": num_streams,
            "tokens": num_tokens,
            "gap_p99_ms": round(1000 * float(np.percentile(gaps, 99))),
            "tokens_per_s": round(
                (num_generated + NUM_LONG_PROMPTS * (num_tokens + 16)) / elapsed_s, 1
            ),
        }

    async def hand_over(self, num_streams: int, num_tokens: int) -> dict[str, object]:
        """One worker computes prompts, one after the other, and another one generates."""
        await self.add_worker("--role", self.roles[1])
        streams = [Stream(self.prompt(num_tokens), BEFORE_EVENT) for _ in range(num_streams)]
        for stream in streams:
            await stream.run(self.client)
        gaps = [[end - start for start, end in pairwise(s.arrivals)] for s in streams]
        step_s = median(gap for of_stream in gaps for gap in of_stream[1:])
        copy_s = _copy_s(num_tokens * SHAPE.kv_bytes(DTYPE))
        return {
            "streams": num_streams,
            "tokens": num_tokens,
            "usual_ms": round(1000 * step_s),
            "hand_over_ms": round(1000 * median(of_stream[0] for of_stream in gaps)),
            "limit_ms": round(1000 * (1.5 * copy_s + step_s) + 5),
        }

    async def _first_token_s(self, prompt: list[int]) -> float:
        begun_at = time.monotonic()
        await Stream(prompt, 1).run(self.client)
        return time.monotonic() - begun_at


def _copy_s(num_bytes: int) -> float:
    """The shortest time of copying this many bytes from memory to memory."""
    source = np.ones(num_bytes, np.uint8)
    target = source.copy()
    times = []
    for _ in range(5):
        begun_at = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun_at)
    return min(times)


Case = Callable[[Deployment, int, int], Awaitable[dict[str, object]]]
CASES: dict[str, tuple[Case, int, int]] = {
    "drain": (Deployment.drain, 32, 1_000),
    "drain of one": (Deployment.drain, 1, 5_000),
    "core killed": (Deployment.kill_core, 32, 1_000),
    "prefix elsewhere": (Deployment.reuse, 3, 4_000),
    "two for both": (Deployment.mix, 8, 2_000),
    "one for each": (Deployment.mix, 8, 2_000),
    "hand-over": (Deployment.hand_over, 8, 5_000),
}
"""With the numbers of streams and of tokens of their prompts."""


ROLES = dict.fromkeys(("one for each", "hand-over"), ("prefill", "decode"))


async def measure(name: str, num_streams: int, num_tokens: int, path: Path) -> dict[str, object]:
    """A line of the table, from a deployment with one worker."""
    case, roles = CASES[name][0], ROLES.get(name, ("both", "both"))
    with (
        TemporaryDirectory(prefix="pagewire-") as folder,
        Cluster(
            Path(folder),
            model=str(path),
            worker_flags=[*WORKER, "--role", roles[0]],
            core_flags=CORE,
            frontend_flags=QUIET,
        ) as cluster,
    ):
        cluster.start()
        async with AsyncClient(cluster.frontend_address()) as client:
            return await case(Deployment(cluster, client, roles), num_streams, num_tokens)


COLUMNS = {
    "case": "case",
    "streams": "streams",
    "tokens": "tokens of each",
    "computed_again": "computed again",
    "pause_p50_ms": "pause p50, ms",
    "pause_max_ms": "longest, ms",
    "usual_ms": "between tokens before, ms",
    "first_token_ms": "first token, ms",
    "ratio": "÷ computed",
    "gap_p99_ms": "between tokens p99, ms",
    "tokens_per_s": "tokens/s",
    "hand_over_ms": "first to second token, ms",
    "limit_ms": "limit, ms",
}
"""Titles by the names in a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pagewire-checkpoints"))
    parser.add_argument("--scale", type=int, default=1, help="divides streams and tokens")
    args = parser.parse_args(arguments)
    exit_on_sigterm()
    args.folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint(SHAPE, DTYPE, args.folder)
    rows: list[dict[str, object]] = []
    load = ForeignLoad()
    for name in args.cases:
        _, num_streams, num_tokens = CASES[name]
        sizes = -(-num_streams // args.scale), num_tokens // args.scale
        rows.append({"case": name} | asyncio.run(measure(name, *sizes, path)))
        print(rows[-1], flush=True)
    facts = f"{SHAPE.name} in {DTYPE}, a thread for each worker."
    publish("moving", facts, COLUMNS, rows, load.cores, args.results)


if __name__ == "__main__":
    main()
