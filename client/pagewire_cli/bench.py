"""`pagewire bench`: a deployment's latencies and throughput under load."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagewire_cli import terminal
from pagewire_cli.load.load_generator import LoadRun, OnEnd, PagewireTarget, RequestRecord
from pagewire_cli.load.summary import Limits, Percentiles, Summary
from pagewire_cli.load.workload import Arrival, Lengths, Workload
from pagewire_cli.options import CONNECTION, Connection, group_of, with_options
from pagewire_client.async_client import AsyncClient
from pagewire_client.deployment import ModelInfo
from pagewire_client.retry import NO_RETRIES

Lines = Sequence[tuple[float, Summary]]
"""Results by rate."""


def render_table(model: str, seed: int, limits: Limits, lines: Lines) -> Table:
    """One row per figure, one column per rate."""
    table = Table(
        "",
        *(_rate(rate) for rate, _ in lines),
        title=f"{model}: requests per second\n--seed {seed}",
        title_justify="left",
    )
    for name, figures in _figures(limits, [summary for _, summary in lines]):
        table.add_row(name, *figures, end_section=name.startswith(("unfinished", "all tokens")))
    return table


def _figures(limits: Limits, of: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    yield "complete", [str(s.num_complete) for s in of]
    yield "failed", [str(s.num_failed) for s in of]
    yield "unfinished", [str(s.num_unfinished) for s in of]
    yield "most at once", [str(s.max_in_flight) for s in of]
    yield "seconds", [f"{s.duration_s:.1f}" for s in of]
    yield "requests/s", [f"{s.requests_per_s:.2f}" for s in of]
    yield f"good ones/s ({_limits(limits)})", [f"{s.good_requests_per_s:.2f}" for s in of]
    yield "output tokens/s", [f"{s.output_tokens_per_s:.0f}" for s in of]
    if any(s.accepted_drafts_percent for s in of):
        yield "of them from drafts, %", [f"{s.accepted_drafts_percent:.1f}" for s in of]
        yield "drafts accepted, %", [f"{s.drafts_accepted_percent:.1f}" for s in of]
    yield "prompt tokens from cache, %", [f"{s.cached_prompt_percent:.1f}" for s in of]
    yield "all tokens/s", [f"{s.total_tokens_per_s:.0f}" for s in of]
    yield from _times("first token, ms", [s.first_token_ms for s in of])
    yield from _times("between tokens, ms", [s.inter_token_ms for s in of])
    yield from _times("whole answer, ms", [s.total_ms for s in of])


def _times(name: str, of: Sequence[Percentiles | None]) -> Iterator[tuple[str, list[str]]]:
    for part in ("mean", "p50", "p90", "p99"):
        cells = ["" if times is None else f"{getattr(times, part):.1f}" for times in of]
        yield f"{name}, {part}", cells


def _rate(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g}"


def _limits(limits: Limits) -> str:
    return f"{1000 * limits.first_token_s:g} / {1000 * limits.inter_token_s:g} ms"


@contextmanager
def progress_bar(workload: Workload) -> Iterator[OnEnd]:
    """Ended requests, on standard error, where that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task(_rate(workload.rate), total=workload.num_requests)

        def on_end(_: RequestRecord) -> None:
            progress.advance(task)

        yield on_end


EXIT_FAILED = 1
_MAX_CACHED_PERCENT = 10.0
"""Random prompts have fewer tokens in common, unless an earlier run has sent them."""


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise typer.BadParameter(f"expected a number above 0, or inf, got {text!r}")
    return value


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load to measure."""

    rate: list[Any] = dataclasses.field(default_factory=lambda: ["inf"])
    """Mean arrivals per second, or `inf` for all at once; several in turn."""
    num_requests: int = 100
    """Requests at each rate."""
    input_tokens: Any = "128"
    """Tokens of a prompt."""
    output_tokens: Any = "128"
    """Tokens of an answer."""
    prefix_tokens: int = 0
    """Length of a prefix that all prompts share, in tokens."""
    concurrency: int | None = None
    """Most requests sent and unfinished."""
    ttft_limit_ms: Any = "1000"
    """Goodput: latest arrival of the first token."""
    itl_limit_ms: Any = "100"
    """Goodput: longest mean time between tokens."""
    warmup: int = 2
    """Warm-up requests, which are not counted."""
    seed: int | None = None
    """Seed of prompts and arrival times, which the table names. A seed that is used again finds its
    prompts in the prefix cache."""
    model: str | None = None
    """Which of the served models."""

    def workload(self, model: ModelInfo) -> Workload:
        """The requests, all at once. Raises ValueError if one is too long for the model."""
        workload = Workload(
            num_requests=self.num_requests,
            rate=math.inf,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            prefix_tokens=self.prefix_tokens,
            vocab_size=model.vocab_size,
        )
        if workload.max_total_tokens > model.max_model_len:
            raise ValueError(
                "prefix_tokens, input_tokens, output_tokens: expected at most the model's length of"
                f" {model.max_model_len} together, got {workload.max_total_tokens}"
            )
        return workload

    @property
    def limits(self) -> Limits:
        """The limits for goodput."""
        return Limits(
            first_token_s=self.ttft_limit_ms / 1000, inter_token_s=self.itl_limit_ms / 1000
        )


_MILLISECONDS = {"parser": _positive, "metavar": "MS"}
_LENGTHS = {"parser": _lengths, "metavar": "N|LOW-HIGH"}
LOAD = group_of(
    Load,
    {
        "rate": {"parser": _positive, "metavar": "RATE"},
        "num_requests": {"min": 1},
        "input_tokens": _LENGTHS,
        "output_tokens": _LENGTHS,
        "prefix_tokens": {"min": 0},
        "concurrency": {"min": 1},
        "ttft_limit_ms": _MILLISECONDS,
        "itl_limit_ms": _MILLISECONDS,
        "warmup": {"min": 0},
        "seed": {"show_default": "drawn at random"},
    },
    has_variables=False,
)


@with_options(load=LOAD, connection=CONNECTION)
def bench(
    connection: Connection,
    load: Load,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file, as JSON.")
    ] = None,
) -> None:
    """Load a deployment with random prompts and measure its latencies and throughput.

    Requests arrive as a Poisson process, whether or not earlier ones have finished. Ctrl-C ends the
    run and shows what was measured so far. The exit code is 1 if a request failed.
    """
    seed = SystemRandom().randrange(2**31) if load.seed is None else load.seed
    bench = _Bench(load, seed, connection)
    if json_file is not None:
        _check_writable(json_file)
    try:
        asyncio.run(bench.run())
    finally:
        _report(bench, json_file)
    if any(record.error is not None for run in bench.runs for record in run.records):
        raise typer.Exit(EXIT_FAILED)


def _check_writable(file: Path) -> None:
    try:
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"--json: cannot write {file}: {error.strerror}") from None


class _Bench:
    """One run for each rate, finished or not."""

    def __init__(self, load: Load, seed: int, connection: Connection) -> None:
        self.load = load
        self.seed = seed
        self.runs: list[LoadRun] = []
        self.model_name = ""
        self._connection = connection

    async def run(self) -> None:
        """All rates, one after the other."""
        load = self.load
        # A refused request is counted, not retried.
        async with self._connection.async_client(NO_RETRIES) as client:
            model = await client.get_model(load.model)
            self.model_name = model.name
            workload = load.workload(model)
            await self._warm_up(client, workload)
            for index, rate in enumerate(load.rate):
                at_rate = dataclasses.replace(workload, rate=rate)
                await self._run(client, at_rate, self.seed + index)

    async def _warm_up(self, client: AsyncClient, workload: Workload) -> None:
        if self.load.warmup == 0:
            return
        few = dataclasses.replace(workload, num_requests=self.load.warmup)
        target = PagewireTarget(client, self.load.model)
        # A seed that no run has, so that no run finds these prompts in the prefix cache.
        await asyncio.gather(*(_read(target, asked) for asked in few.arrivals(self.seed - 1)))

    async def _run(self, client: AsyncClient, workload: Workload, seed: int) -> None:
        with progress_bar(workload) as on_end:
            run = LoadRun(
                PagewireTarget(client, self.load.model),
                workload.arrivals(seed),
                concurrency=self.load.concurrency,
                on_end=on_end,
            )
            self.runs.append(run)
            await run.run()


async def _read(target: PagewireTarget, arrival: Arrival) -> None:
    async for _ in target.stream(arrival):
        pass


def _report(bench: _Bench, json_file: Path | None) -> None:
    """Print the table and write the file; nothing if no run was started."""
    if not bench.runs:
        return
    load, limits = bench.load, bench.load.limits
    summaries = [Summary.of(run, limits) for run in bench.runs]
    lines = list(zip(load.rate, summaries, strict=False))  # fewer if interrupted
    Console().print(render_table(bench.model_name, bench.seed, limits, lines))
    for _, summary in lines:
        if summary.cached_prompt_percent > _MAX_CACHED_PERCENT and not load.prefix_tokens:
            terminal.note(
                f"warning: {summary.cached_prompt_percent:g} % of the prompt tokens came from the"
                " prefix cache: an earlier run has sent these prompts; another --seed has new ones"
            )
        for error, count in summary.errors.items():
            terminal.error(f"{count} requests failed: {error}")
    if json_file is None:
        return
    figures = {
        "model": bench.model_name,
        "num_requests": load.num_requests,
        "input_tokens": str(load.input_tokens),
        "output_tokens": str(load.output_tokens),
        "prefix_tokens": load.prefix_tokens,
        "concurrency": load.concurrency,
        "seed": bench.seed,
        "limits": dataclasses.asdict(limits),
        "rates": [{"rate": str(rate)} | dataclasses.asdict(summary) for rate, summary in lines],
    }
    json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
