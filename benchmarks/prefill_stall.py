"""Gaps in a stream while a long prompt arrives, and the cost of bounding them.

    python -m benchmarks.prefill_stall

While one request decodes, one with a long prompt is sent. Gaps are the times between messages of
the first until the second has a token; speed is that of this prefill. Two `pagewire serve`, one
with `--max-step-ms` and one without a limit (0), take turns, the first ones just after the start.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.engines.engine import Settings
from benchmarks.engines.servers import ServedPagewire, all_of
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm
from benchmarks.measuring.tables import publish, script_parser
from benchmarks.models.model_shapes import SHAPES
from benchmarks.models.synthetic_tokenizer import FIRST_WORD_ID
from pagewire_cli.load.load_generator import Target
from pagewire_cli.load.workload import Arrival
from scheduler_service.core import SchedulerConfig

STREAM_TOKENS, MESSAGES_BEFORE = 1024, 8


async def gaps_of(target: Target, stream: Arrival, prompt: Arrival) -> list[float]:
    """Gaps of `stream` in seconds from the moment `prompt` is sent to its first token."""
    times: list[float] = []
    has_begun = asyncio.Event()

    async def decode() -> None:
        async with aclosing(target.stream(stream)) as messages:
            async for _ in messages:
                times.append(time.perf_counter())
                if len(times) == MESSAGES_BEFORE:
                    has_begun.set()
        raise RuntimeError(f"the stream ended after {len(times)} messages, before the prefill")

    async with asyncio.TaskGroup() as group:
        decoding = group.create_task(decode())
        await has_begun.wait()
        sent = time.perf_counter()
        async for _ in target.stream(prompt):
            pass
        ended = time.perf_counter()
        decoding.cancel()
    return [b - a for a, b in pairwise([sent, *(at for at in times if sent < at < ended), ended])]


def row(num_prompt_tokens: int, runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures of some runs of one server."""
    return {
        "largest gap, s": round(max(map(max, runs)), 3),
        "p99, s": round(float(np.percentile(np.concatenate(runs), 99)), 3),
        "prompt tokens/s": round(num_prompt_tokens / median(map(sum, runs)), 1),
    }


async def measure(args: argparse.Namespace, settings: Settings) -> dict[str, dict[str, float]]:
    """Rows of both servers, by name."""
    draw, words = np.random.default_rng(0), (FIRST_WORD_ID, settings.shape.vocab_size)
    limits = (args.max_step_ms, 0.0)
    servers = {f"max_step_ms {ms:g}": ServedPagewire(settings, max_step_ms=ms) for ms in limits}
    runs: dict[str, list[list[float]]] = {name: [] for name in servers}
    async with all_of(list(servers.values())):
        for _ in range(args.repeats):
            prompt = draw.integers(*words, args.prompt_tokens).tolist()
            requests = Arrival(0.0, prompt[-16:], STREAM_TOKENS), Arrival(0.0, prompt, 1)
            for name, server in servers.items():
                runs[name].append(await gaps_of(server.target, *requests))
                print(name, row(args.prompt_tokens, runs[name][-1:]), flush=True)
    return {name: row(args.prompt_tokens, runs[name]) for name in servers}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--max-step-ms", type=float, default=SchedulerConfig().max_step_ms)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/pagewire-checkpoints"))
    args = parser.parse_args(arguments)
    about = {name: getattr(args, name) for name in ("shape", "dtype", "prompt_tokens", "repeats")}
    exit_on_sigterm()
    load = ForeignLoad()
    settings = Settings(
        shape=SHAPES[args.shape],
        dtype=args.dtype,
        checkpoints=args.checkpoints,
        max_model_len=args.prompt_tokens + STREAM_TOKENS,
    )
    rows = asyncio.run(measure(args, settings))
    limited, unlimited = rows.values()
    rows["ratio"] = {name: round(limited[name] / unlimited[name], 3) for name in limited}
    table = [{"limit": name, **figures} for name, figures in rows.items()]
    facts = (
        f"{args.shape} in {args.dtype}, a prompt of {args.prompt_tokens} tokens, "
        f"the largest gap and the median speed of {args.repeats} runs in alternation."
    )
    columns = {name: name for name in table[0]} | {"limit": ""}
    publish("prefill_stall", facts, columns, table, load.cores, args.results, **about)


if __name__ == "__main__":
    main()
