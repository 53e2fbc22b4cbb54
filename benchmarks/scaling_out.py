"""Effect of starting and stopping workers on open requests.

    python -m benchmarks.scaling_out --seconds 600

The services of docker-compose.yml run as processes: a scheduler core, a frontend and CPU workers
with the embedded model, in float32. As by `docker compose up --scale worker-cpu=N`, the number of
workers changes repeatedly under load: one worker becomes four, then the three that have served
longest receive SIGTERM. Meanwhile streams send greedy requests without a pause and without retries.
Every output is compared, token by token, with that of an undisturbed run at the beginning, in which
each request was alone. Exits with 1 if a request failed or had another output.
"""

import argparse
import asyncio
import itertools
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import yaml

from benchmarks.machine import ForeignLoad, save
from benchmarks.processes import exit_on_sigterm, free_port
from benchmarks.tables import print_table, script_parser
from pagewire_cli.local.health import is_serving
from pagewire_client import NO_RETRIES, AsyncClient, PagewireError, RequestOutput, SamplingParams
from tools.launch import ROOT, Service, module

FEW, MANY = 1, 4
"""Workers at the ends and in between."""

FIRST_TOKEN_ID, END_TOKEN_ID = 5, 250
NUM_JOBS = 32
_START_TIMEOUT_S = 300.0
_POLL_S = 0.1

Row = dict[str, Any]


COMPOSE_FILE = ROOT / "docker-compose.yml"
FRONTEND, SCHEDULER, WORKER = "frontend", "scheduler", "worker-cpu"

END_TIMEOUT_S = 40.0
"""The file's `stop_grace_period`."""
_NAMED_PORT = re.compile(r"^(scheduler|frontend|0\.0\.0\.0):(\d+)$")
_DEFAULT_OF_VARIABLE = re.compile(r"\$\{\w+:-(.*)\}")


class Composed:
    """The services of docker-compose.yml as processes on this machine, with the same commands; a
    context manager that ends them all.

    Host names become the loopback address. A service that others find by its name has one port;
    workers each take a free one, as each container has addresses of its own.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        """`environment`: variables for all services, in addition to the file's own. `logs`: an
        existing folder."""
        self._services: Mapping[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
        self._environment = environment
        self._logs = logs
        self._ports = {port: str(free_port()) for port in ("7600", "7610", "8000")}
        self._ports |= dict.fromkeys(("7601", "7611", "7620", "7621"), "0")
        self._started: list[Service] = []

    @property
    def address(self) -> str:
        """Addresses for clients."""
        return f"127.0.0.1:{self._ports['7600']}"

    def start(self, service: str) -> Service:
        """One more container of a service."""
        settings = self._services[service]
        words = [self._on_loopback(word) for word in settings["command"]]
        own = {name: _value(text) for name, text in settings.get("environment", {}).items()}
        name = f"{service}-{len(self._started)}"
        self._started.append(
            Service(
                name,
                module("pagewire_cli", *words),
                self._logs / f"{name}.log",
                {**own, **self._environment},
            )
        )
        return self._started[-1]

    def _on_loopback(self, word: str) -> str:
        return _NAMED_PORT.sub(lambda match: f"127.0.0.1:{self._ports[match[2]]}", word)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Stop in reverse order; after an error kill, as requests may be open."""
        for service in reversed(self._started):
            if service.exit_code is not None:
                continue
            if error is None:
                service.end(END_TIMEOUT_S)
            else:
                service.kill()


def _value(text: str) -> str:
    """A variable's value in the file, where `${NAME:-default}` stands for the default."""
    match = _DEFAULT_OF_VARIABLE.fullmatch(text)
    return match[1] if match else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A request that is made again and again."""

    prompt: list[int]
    num_tokens: int


@dataclass(slots=True)
class Stage:
    """A period with `num_workers` workers, and the outcomes of requests that ended in it."""

    num_workers: int
    started_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    num_moved: int = 0
    """Requests that spent time between two workers."""
    num_different: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def draw_jobs(num_jobs: int, max_tokens: int) -> list[Job]:
    """The same ones in every run."""
    draw = random.Random(0)
    return [
        Job(
            prompt=draw.choices(range(FIRST_TOKEN_ID, END_TOKEN_ID), k=draw.randint(4, 64)),
            num_tokens=draw.randint(max_tokens // 4, max_tokens),
        )
        for _ in range(num_jobs)
    ]


class Load:
    """Streams that request one job after the other."""

    def __init__(self, client: AsyncClient, jobs: Sequence[Job]) -> None:
        self.stages: list[Stage] = []
        self._client = client
        self._jobs = jobs
        self._expected: list[list[int]] = []
        self._is_over = False

    async def run_undisturbed(self) -> None:
        """Record the output of each job when it is alone."""
        for job in self._jobs:
            output = await self._ask(job)
            self._expected.append(output.outputs[0].token_ids)

    def begin_stage(self, num_workers: int) -> None:
        """Record that there are `num_workers` workers from now on."""
        if self.stages and self.stages[-1].num_workers == num_workers:
            return
        self._end_stage()
        self.stages.append(Stage(num_workers))

    def end(self) -> None:
        """Let each stream finish its current request."""
        self._is_over = True

    async def run(self, num_streams: int) -> None:
        """All streams, until the end."""
        await asyncio.gather(*(self._stream(number) for number in range(num_streams)))
        self._end_stage()

    def _end_stage(self) -> None:
        if self.stages:
            self.stages[-1].seconds = time.monotonic() - self.stages[-1].started_at

    async def _stream(self, number: int) -> None:
        draw = random.Random(number)
        while not self._is_over:
            index = draw.randrange(len(self._jobs))
            try:
                output = await self._ask(self._jobs[index])
            except PagewireError as error:
                self.stages[-1].errors[f"{type(error).__name__}: {error.message}"] += 1
                await asyncio.sleep(_POLL_S)  # or requests that fail would keep the services busy
            else:
                self._note(output, self._expected[index])

    async def _ask(self, job: Job) -> RequestOutput:
        params = SamplingParams(temperature=0.0, max_tokens=job.num_tokens, ignore_eos=True)
        return await self._client.generate(job.prompt, params)

    def _note(self, output: RequestOutput, expected: Sequence[int]) -> None:
        stage, tokens = self.stages[-1], output.outputs[0].token_ids
        stage.num_requests += 1
        stage.num_tokens += len(tokens)
        stage.num_different += tokens != expected
        stage.num_moved += output.timings is not None and output.timings.recovery_us > 0


class Fleet:
    """The workers that serve, the one that has served longest first."""

    def __init__(self, composed: Composed, client: AsyncClient) -> None:
        self.ended: list[Service] = []
        self._composed = composed
        self._client = client
        self._workers: list[Service] = []

    def start_first(self) -> None:
        """Start the first worker, before any status shows which ones are ready."""
        self._workers.append(self._composed.start(WORKER))

    async def scale(self, num_workers: int) -> None:
        """Start or stop workers, and wait until `num_workers` are ready and the others gone."""
        while len(self._workers) < num_workers:
            self._workers.append(self._composed.start(WORKER))
        leaving = self._workers[: len(self._workers) - num_workers]
        del self._workers[: len(leaving)]
        await asyncio.gather(*(asyncio.to_thread(worker.end, END_TIMEOUT_S) for worker in leaving))
        self.ended += leaving
        async with asyncio.timeout(_START_TIMEOUT_S):
            while await self._num_ready() != num_workers:
                dead = [worker.name for worker in self._workers if worker.exit_code is not None]
                if dead:
                    raise RuntimeError(f"ended unexpectedly: {', '.join(dead)}")
                await asyncio.sleep(_POLL_S)

    async def _num_ready(self) -> int:
        status = await self._client.get_status()
        return sum(group.state == "ready" for group in status.groups)


async def run(
    composed: Composed, *, seconds: float, num_cycles: int, num_streams: int, jobs: Sequence[Job]
) -> tuple[Load, Fleet]:
    """Start, load, scale out and in `num_cycles` times within the duration, and end the load."""
    composed.start(SCHEDULER)
    composed.start(FRONTEND)
    async with AsyncClient(composed.address, retry=NO_RETRIES) as client:
        load, fleet = Load(client, jobs), Fleet(composed, client)
        fleet.start_first()
        await asyncio.to_thread(_wait_serving, composed.address)
        await load.run_undisturbed()
        load.begin_stage(FEW)
        asking = asyncio.create_task(load.run(num_streams))
        try:
            await _scale_repeatedly(fleet, load, num_cycles, seconds)
        finally:
            load.end()
            await asking
    return load, fleet


def _wait_serving(address: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_serving(address):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not serving after {_START_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


async def _scale_repeatedly(fleet: Fleet, load: Load, num_cycles: int, seconds: float) -> None:
    """Spend equal times with each number of workers, including the time of the change."""
    started_at = time.monotonic()
    sizes = list(itertools.islice(itertools.cycle((FEW, MANY)), 2 * num_cycles + 1))
    for number, size in enumerate(sizes, 1):
        await fleet.scale(size)
        load.begin_stage(size)
        print(f"{size} workers after {time.monotonic() - started_at:.0f} s", file=sys.stderr)
        left_s = started_at + seconds * number / len(sizes) - time.monotonic()
        await asyncio.sleep(max(0.0, left_s))


def figures_of(load: Load, fleet: Fleet) -> Row:
    """All figures of a run."""
    leaving = [worker.leaving_s for worker in fleet.ended if worker.leaving_s is not None]
    errors: Counter[str] = sum((stage.errors for stage in load.stages), Counter())
    return {
        "num_requests": sum(stage.num_requests for stage in load.stages) + errors.total(),
        "num_failed": errors.total(),
        "errors": dict(errors),
        "num_different": sum(stage.num_different for stage in load.stages),
        "num_moved": sum(stage.num_moved for stage in load.stages),
        "num_ended_workers": len(fleet.ended),
        "exit_codes": sorted({worker.exit_code for worker in fleet.ended if worker.exit_code}),
        "leaving_s_median": round(median(leaving), 2) if leaving else None,
        "leaving_s_most": round(max(leaving), 2) if leaving else None,
        "rows": [_row(stage) for stage in load.stages],
    }


def _row(stage: Stage) -> Row:
    return {
        "num_workers": stage.num_workers,
        "seconds": round(stage.seconds, 1),
        "num_requests": stage.num_requests,
        "num_failed": stage.errors.total(),
        "num_different": stage.num_different,
        "num_moved": stage.num_moved,
        "tokens_per_s": round(stage.num_tokens / max(stage.seconds, 1e-9)),
    }


COLUMNS = {
    "num_workers": "workers",
    "seconds": "seconds",
    "num_requests": "answers",
    "num_failed": "failed",
    "num_different": "other tokens",
    "num_moved": "moved",
    "tokens_per_s": "tokens/s",
}
"""Titles by the names in a row."""


def show(figures: Mapping[str, Any]) -> None:
    """Print the table."""
    print_table(figures["rows"], "requests while workers come and go", COLUMNS, width=100)
    print(
        f"{figures['num_requests']} requests, {figures['num_failed']} failed, "
        f"{figures['num_different']} with other tokens, {figures['num_moved']} moved; "
        f"{figures['num_ended_workers']} workers ended, in {figures['leaving_s_median']} s at the "
        f"median, {figures['leaving_s_most']} s at most"
    )


def _parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load, in all")
    parser.add_argument("--cycles", type=int, default=5, help="times to scale out and in")
    parser.add_argument("--streams", type=int, default=12, help="that ask at the same time")
    parser.add_argument("--max-tokens", type=int, default=512, help="of the longest answer")
    parser.add_argument("--simulate", action="store_true", help="workers without a model")
    parser.add_argument("--logs", type=Path, help="folder for what the services say")
    return parser


def _environment(args: argparse.Namespace) -> dict[str, str]:
    simulated = {"PAGEWIRE_SIMULATE": "1", "PAGEWIRE_SIMULATE_STEP_US": "5000"}
    return {"PAGEWIRE_DTYPE": "float32", **(simulated if args.simulate else {})}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    args = _parser().parse_args(arguments)
    exit_on_sigterm()
    foreign = ForeignLoad()
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        composed = stack.enter_context(Composed(_environment(args), logs))
        work = run(
            composed,
            seconds=args.seconds,
            num_cycles=args.cycles,
            num_streams=args.streams,
            jobs=draw_jobs(NUM_JOBS, args.max_tokens),
        )
        figures = figures_of(*asyncio.run(work))
    settings = {"seconds": args.seconds, "cycles": args.cycles, "streams": args.streams}
    show(figures)
    save("scaling_out", settings | figures, foreign.cores, args.results)
    if figures["num_failed"] or figures["num_different"] or figures["exit_codes"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
