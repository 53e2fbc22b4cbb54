"""Latencies and goodput of served models at increasing request rates.

    python -m benchmarks.online --checkpoints FOLDER --vllm-python ENVIRONMENT/bin/python

Pagewire and vLLM serve the same checkpoint with random weights on the same machine, and get the
same prompts at the same times (Poisson arrivals) from the same load generator, that of `pagewire
bench`. At each rate they run in turns, `--repeats` times with different prompts, while the other
one is idle. Figures are medians over the repeats.

Both are called by the same client of the OpenAI API over HTTP. With `--grpc`, Pagewire has a third
turn through its own API.
"""

import argparse
import asyncio
import math
import signal
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.engine import Settings
from benchmarks.engines.servers import ServedPagewire, ServedVllm, Server, all_of
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.tables import publish, script_parser
from benchmarks.models.model_shapes import SHAPES
from pagewire_cli.load.load_generator import LoadRun, Target
from pagewire_cli.load.summary import Limits, Summary
from pagewire_cli.load.workload import Lengths, Workload

WARMUP_REQUESTS = 8

Row = dict[str, Any]


async def measure_rates(
    servers: Sequence[Server],
    workload: Workload,
    rates: Sequence[float],
    *,
    seconds: float,
    limits: Limits,
    repeats: int,
) -> tuple[list[Row], float]:
    """A row for each rate and server, and the number of cores that other processes kept busy.

    `workload`: its rate and number of requests are those of arrivals for `seconds` at each rate.
    """
    _cancel_on_sigterm()
    async with all_of(servers):
        for server in servers:
            await _in_turn(server, _warm_up(server.target, workload))
        load = ForeignLoad()
        rows: list[Row] = []
        for index, rate in enumerate(rates):
            at_rate = replace(workload, rate=rate, num_requests=math.ceil(rate * seconds))
            seen: dict[str, list[Summary]] = {server.name: [] for server in servers}
            for repeat in range(repeats):
                # New prompts in each repeat, so that none is cached; the same for all servers.
                arrivals = at_rate.arrivals(seed=1 + index * repeats + repeat)
                for server in servers:
                    run = LoadRun(server.target, arrivals)
                    await _in_turn(server, run.run())
                    seen[server.name].append(Summary.of(run, limits))
                    _print_summary(server, rate, seen[server.name][-1])
            rows += [row(server, rate, seen[server.name]) for server in servers]
        return rows, load.cores


def _cancel_on_sigterm() -> None:
    """SIGTERM must not leave servers behind, least of all stopped ones."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _print_summary(server: Server, rate: float, seen: Summary) -> None:
    text = f"{server.name} at {rate:g}/s: {seen.num_complete} complete, {seen.num_failed} failed"
    print(f"{text}, {seen.duration_s:.0f} s", *seen.errors, sep="\n  ", file=sys.stderr)


async def _in_turn(server: Server, work: Awaitable[None]) -> None:
    server.resume()
    try:
        await work
    finally:
        server.pause()


async def _warm_up(target: Target, workload: Workload) -> None:
    """Warm up, so that everything is compiled and allocated; raises if requests fail."""
    longest = Lengths(workload.input_tokens.high, workload.input_tokens.high)
    few = replace(workload, num_requests=WARMUP_REQUESTS, rate=math.inf, input_tokens=longest)
    run = LoadRun(target, few.arrivals(seed=0))
    await run.run()
    for record in run.records:
        if record.error is not None:
            raise RuntimeError(f"a request to warm up failed: {record.error}")


def row(server: Server, rate: float, seen: Sequence[Summary]) -> Row:
    """Medians over the repeats; counts are sums."""
    figures: Row = {"engine": server.name, "interface": server.interface, "rate": rate}
    for name in ("num_complete", "num_failed", "num_good"):
        figures[name] = sum(getattr(summary, name) for summary in seen)
    figures["good_share"] = round(
        figures["num_good"] / max(1, figures["num_complete"] + figures["num_failed"]), 4
    )
    rates = ("requests_per_s", "output_tokens_per_s", "good_requests_per_s", "client_cores")
    for name in (*rates, "max_in_flight"):
        figures[name] = median(getattr(summary, name) for summary in seen)
    for name in ("first_token_ms", "inter_token_ms", "total_ms"):
        times = [asdict(part) for s in seen if (part := getattr(s, name)) is not None]
        for part in ("p50", "p90", "p99"):
            kept = [timing[part] for timing in times]
            figures[f"{name}_{part}"] = round(median(kept), 2) if kept else None
    return figures


def best_goodput(rows: Sequence[Row], share: float = 0.9) -> dict[str, float]:
    """Per engine, the highest rate at which at least this share of the requests was good, with all
    rates below it; 0 if there is none."""
    best: dict[str, float] = {}
    failed: set[str] = set()
    for line in sorted(rows, key=lambda line: float(line["rate"])):
        engine = line["engine"]
        best.setdefault(engine, 0.0)
        if line["good_share"] < share:
            failed.add(engine)
        elif engine not in failed:
            best[engine] = line["rate"]
    return best


COLUMNS = {
    "rate": "requests/s",
    "engine": "engine",
    "first_token_ms_p50": "first token p50, ms",
    "first_token_ms_p90": "p90",
    "first_token_ms_p99": "p99",
    "inter_token_ms_p50": "between tokens p50, ms",
    "inter_token_ms_p90": "p90",
    "inter_token_ms_p99": "p99",
    "total_ms_p50": "answer p50, ms",
    "total_ms_p99": "p99",
    "output_tokens_per_s": "output tokens/s",
    "good_requests_per_s": "good requests/s",
    "num_failed": "failed",
    "client_cores": "client, cores",
}
"""Titles by the names in a row."""


def _parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__)
    parser.add_argument("--shape", default="llama-160m", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2, 3, 4, 6])
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals at each rate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input-tokens", type=Lengths.parse, default=Lengths(32, 512))
    parser.add_argument("--output-tokens", type=Lengths.parse, default=Lengths(32, 128))
    parser.add_argument("--ttft-limit-ms", type=float, default=1000.0)
    parser.add_argument("--itl-limit-ms", type=float, default=100.0)
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM")
    parser.add_argument("--grpc", action="store_true", help="Pagewire by its own interface, too")
    parser.add_argument("--checkpoints", type=Path, help="folder to make checkpoints in, and keep")
    parser.add_argument("--logs", type=Path, help="folder for what the servers say")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    args = _parser().parse_args(arguments)
    limits = Limits(first_token_s=args.ttft_limit_ms / 1000, inter_token_s=args.itl_limit_ms / 1000)
    workload = Workload(
        num_requests=WARMUP_REQUESTS,
        rate=math.inf,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        vocab_size=SHAPES[args.shape].vocab_size,
    )
    with ExitStack() as stack:
        folder = args.checkpoints or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(
            shape=SHAPES[args.shape],
            dtype=args.dtype,
            device=args.device,
            checkpoints=folder,
            logs=args.logs,
        )
        servers: list[Server] = [ServedPagewire(settings)]
        if args.grpc:
            servers.append(ServedPagewire(settings, "gRPC"))
        if args.vllm_python is not None:
            servers.append(ServedVllm(args.vllm_python, settings))
        rows, foreign_cores = asyncio.run(
            measure_rates(
                servers,
                workload,
                sorted(args.rates),
                seconds=args.seconds,
                limits=limits,
                repeats=args.repeats,
            )
        )
    best = ", ".join(f"{engine} {rate:g}/s" for engine, rate in best_goodput(rows).items())
    facts = (
        f"{args.shape} in {args.dtype} on {args.device}, prompts of {args.input_tokens} tokens, "
        f"answers of {args.output_tokens}; arrivals for {args.seconds:g} s at each rate, "
        f"{args.repeats} times, medians. Good: first token within {args.ttft_limit_ms:g} ms, "
        f"further ones {args.itl_limit_ms:g} ms apart on average. The highest rate up to which "
        f"90 % were good: {best}."
    )
    publish("online", facts, COLUMNS, rows, foreign_cores, args.results)


if __name__ == "__main__":
    main()
