"""Engines that run the same jobs in turns, so that a drifting machine affects all equally."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.engines.engine import Engine, Outputs
from benchmarks.engines.workloads import Job, Workload, warm_up
from benchmarks.measuring.ceilings import Ceilings
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import processor_seconds
from benchmarks.models.model_shapes import Shape

MOST_REPEATS = 7
"""Turns of a short workload, unless more are requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One engine's turn at one workload."""

    tokens_per_s: float
    seconds: float
    foreign_cores: float
    """Processor time per second of all processes other than the engine and this process; includes
    that of idle engines."""
    ceilings: Ceilings | None = None
    """The machine's ceilings just before and after, if measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """The number of turns of each engine."""

    repeats: int = 3
    slow_repeats: int = 1
    """Repeats of an engine that takes more than `slow_factor` times as long as the fastest."""
    slow_factor: float = 1.5
    least_s: float = 0.0
    """Short workloads are repeated until an engine has run for this long."""
    most_repeats: int = MOST_REPEATS

    def __post_init__(self) -> None:
        if not 1 <= self.slow_repeats <= self.repeats <= self.most_repeats:
            raise ValueError(
                f"expected 1 <= slow_repeats <= repeats <= {self.most_repeats}, got slow_repeats"
                f" {self.slow_repeats} and repeats {self.repeats}"
            )

    def wants(self, runs: Sequence[Run], fastest_s: float) -> bool:
        """Whether an engine with these runs should run again."""
        if len(runs) < self.slow_repeats or not runs:
            return True
        times = [run.seconds for run in runs]
        if statistics.median(times) > self.slow_factor * fastest_s:
            return False
        is_short = sum(times) < self.least_s and len(runs) < self.most_repeats
        return len(runs) < self.repeats or is_short


@dataclass(slots=True)
class Results:
    """Runs by workload and engine."""

    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)

    def of(self, workload: str, engine: str) -> list[Run]:
        """The runs of one engine at one workload."""
        return self.runs.setdefault(workload, {}).setdefault(engine, [])

    def add(self, others: "Results") -> None:
        """Append the runs of others."""
        for workload, by_engine in others.runs.items():
            for engine, runs in by_engine.items():
                self.of(workload, engine).extend(runs)

    def fastest_s(self, workload: str) -> float:
        """The median seconds of the fastest engine so far."""
        medians = [
            statistics.median(run.seconds for run in runs)
            for runs in self.runs.get(workload, {}).values()
            if runs
        ]
        return min(medians, default=float("inf"))


@dataclass(frozen=True, slots=True)
class CeilingGauge:
    """Measures the machine's ceilings before and after the turns of one engine: its speed may
    change by half within minutes if other machines on the same host use its memory bandwidth."""

    engine: str
    measure: Callable[[], Ceilings]

    def around(self, name: str, turn: Callable[[], Run]) -> Run:
        """Run a turn of an engine, and measure the ceilings if it is the engine of this gauge."""
        if name != self.engine:
            return turn()
        before = self.measure()
        run = turn()
        return replace(run, ceilings=before.mean(self.measure()))


class WrongOutput(Exception):
    """An engine returned wrong output."""


def run_in_turns(
    engines: Sequence[Engine],
    workloads: Sequence[Workload],
    shape: Shape,
    scale: float,
    patience: Patience,
    gauge: CeilingGauge | None = None,
    on_run: Callable[[str, str, Run], None] = lambda workload, engine, run: None,
) -> Results:
    """Run all engines in turns, after a short warm-up run. Raises WrongOutput."""
    draw = np.random.default_rng(0)
    results = Results()
    for engine in engines:
        for workload in workloads:
            jobs = warm_up(workload.make_jobs(draw, shape.vocab_size, scale))
            take_turn(engine, jobs, shape.vocab_size, num_tokens=1)
    for turn in range(patience.most_repeats):
        for workload in workloads:
            jobs = workload.make_jobs(draw, shape.vocab_size, scale)
            fastest_s = results.fastest_s(workload.name)
            for engine in _rotated(engines, turn):
                runs = results.of(workload.name, engine.name)
                if patience.wants(runs, fastest_s):
                    tokens = workload.num_tokens(jobs)
                    take = partial(take_turn, engine, jobs, shape.vocab_size, tokens)
                    runs.append(gauge.around(engine.name, take) if gauge else take())
                    on_run(workload.name, engine.name, runs[-1])
    return results


def take_turn(engine: Engine, jobs: list[Job], vocab_size: int, num_tokens: int) -> Run:
    """One run, while the other engines are paused. `num_tokens`: those that count."""
    engine.resume()
    load = ForeignLoad(lambda: _own_seconds(engine.pids))
    outputs = engine.run(jobs)
    foreign = load.cores
    engine.pause()
    check(engine.name, jobs, outputs, vocab_size)
    return Run(
        tokens_per_s=num_tokens / outputs.seconds, seconds=outputs.seconds, foreign_cores=foreign
    )


def check(name: str, jobs: Sequence[Job], outputs: Outputs, vocab_size: int) -> None:
    """Raise WrongOutput unless the numbers of tokens are right and all are in the vocabulary."""
    got = [len(tokens) for tokens in outputs.token_ids]
    asked = [job.num_output_tokens for job in jobs]
    if got != asked:
        raise WrongOutput(f"{name}: requested {asked} tokens, got {got}")
    if not all(0 <= token < vocab_size for tokens in outputs.token_ids for token in tokens):
        raise WrongOutput(f"{name}: a token is not in the vocabulary of {vocab_size}")


def _own_seconds(pids: Sequence[int]) -> float:
    """Processor time of this process alone, and of an engine's with all their descendants."""
    times = os.times()
    return times.user + times.system + sum(map(processor_seconds, pids))


def _rotated(engines: Sequence[Engine], turn: int) -> list[Engine]:
    """The engines in another order in each turn, so that none always follows the same one."""
    start = turn % len(engines)
    return [*engines[start:], *engines[:start]]
