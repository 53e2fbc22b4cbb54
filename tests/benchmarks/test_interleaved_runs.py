"""Engines take turns at the same jobs, are checked, and compared."""

from collections.abc import Sequence
from typing import Self

import pytest

from benchmarks.engines.comparison import compare, num_equal
from benchmarks.engines.engine import About, Engine, Outputs
from benchmarks.engines.interleaved_runs import (
    CeilingGauge,
    Patience,
    Results,
    Run,
    run_in_turns,
)
from benchmarks.engines.workloads import WORKLOADS, Job, Workload
from benchmarks.measuring.ceilings import Ceilings
from benchmarks.models.model_shapes import SHAPES

SHAPE = SHAPES["llama-160m"]
CEILINGS = Ceilings(read_bytes_per_s=4e10, flops_per_s=5e11)


class Made:
    """An engine that takes a given time, and records its arguments."""

    pids: Sequence[int] = ()

    def __init__(self, name: str, seconds: float, *, missing: int = 0) -> None:
        self.name = name
        self.about = About(version="1")
        self.jobs: list[list[Job]] = []
        self.running = False
        self._seconds = seconds
        self._missing = missing

    def run(self, jobs: list[Job]) -> Outputs:
        assert self.running
        self.jobs.append(jobs)
        tokens = [[7] * (job.num_output_tokens - self._missing) for job in jobs]
        return Outputs(token_ids=tokens, seconds=self._seconds)

    def pause(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def run_all(engines: Sequence[Engine], workloads: Sequence[Workload], **patience: float) -> Results:
    return run_in_turns(engines, workloads, SHAPE, 1 / 16, Patience(**patience))  # type: ignore[arg-type]


def test_all_get_the_same_jobs_and_none_twice() -> None:
    engines = [Made("pagewire", 1.0), Made("vllm", 1.0)]
    run_all(engines, [WORKLOADS["mixed"]], repeats=3)
    warm_up, *counted = engines[0].jobs
    assert counted == engines[1].jobs[1:]
    assert len(counted) == 3
    prompts = {tuple(job.prompt) for jobs in counted for job in jobs}
    assert len(prompts) == 3 * len(counted[0])
    lengths = [[(len(job.prompt), job.num_output_tokens) for job in jobs] for jobs in counted]
    assert lengths[0] == lengths[1] == lengths[2]
    assert len(warm_up) < len(counted[0])
    assert not any(engine.running for engine in engines)


def test_ceilings_are_those_around_a_turn_of_ours() -> None:
    measured = iter([(20.0, 1.0), (60.0, 1.0), (40.0, 6.0), (40.0, 2.0)])

    def measure() -> Ceilings:
        assert not any(engine.running for engine in engines)
        read, flops = next(measured)
        return Ceilings(read_bytes_per_s=read, flops_per_s=flops)

    engines = [Made("pagewire", 1.0), Made("vllm", 1.0)]
    gauge = CeilingGauge("pagewire", measure)
    patience = Patience(repeats=2)
    results = run_in_turns(engines, [WORKLOADS["single"]], SHAPE, 1 / 16, patience, gauge)
    assert [run.ceilings for run in results.of("single", "pagewire")] == [
        Ceilings(read_bytes_per_s=30.0, flops_per_s=1.0),
        Ceilings(read_bytes_per_s=40.0, flops_per_s=3.0),
    ]
    assert [run.ceilings for run in results.of("single", "vllm")] == [None, None]


def test_who_is_far_behind_runs_less_often() -> None:
    engines = [Made("pagewire", 1.0), Made("vllm", 1.4), Made("transformers", 1.6)]
    results = run_all(engines, [WORKLOADS["single"]], repeats=3, slow_repeats=1)
    assert {name: len(runs) for name, runs in results.runs["single"].items()} == {
        "pagewire": 3,
        "vllm": 3,
        "transformers": 1,
    }


def results_of(**rates: Sequence[float]) -> Results:
    results = Results()
    for name, values in rates.items():
        runs = results.of("mixed", name.replace("_", " ").replace("in process", "in-process"))
        runs += [
            Run(tokens_per_s=rate, seconds=100 / rate, foreign_cores=0.1, ceilings=CEILINGS)
            for rate in values
        ]
    return results


def four_seconds(ceilings: Ceilings) -> float:
    assert ceilings == CEILINGS
    return 4.0


def test_ratios_are_of_medians_against_the_best_peer() -> None:
    rates = {
        "pagewire": [10, 30, 20],
        "pagewire_in_process": [16],
        "vllm": [8, 9],
        "transformers": [2],
    }
    (row,) = compare(results_of(**rates), {"mixed": four_seconds})
    names = ("pagewire", "pagewire in-process", "vllm", "transformers")
    assert [row[name] for name in names] == [20, 16, 8.5, 2]
    assert row["best_peer"] == "vllm"
    assert row["ratio"] == pytest.approx(20 / 8.5, abs=1e-3)
    assert row["services_over_in_process"] == 1.25
    assert row["shares_of_floor"] == [0.4, 1.2, 0.8]
    assert row["share_of_floor"] == pytest.approx(
        (3 * 4) / (100 / 10 + 100 / 30 + 100 / 20), abs=1e-3
    )
    assert row["spread"] == {
        "pagewire": 2.0,
        "pagewire in-process": 0.0,
        "vllm": 0.125,
        "transformers": 0.0,
    }


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    pairs = [([1, 2, 3], [1, 2, 3]), ([4, 9, 6], [4, 5, 6]), ([7, 8, 9], [0, 8, 9])]
    assert [num_equal(*pair) for pair in pairs] == [3, 1, 0]
