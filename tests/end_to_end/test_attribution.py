"""Each response's timings add up to the time its client waited, and each part is true."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagewire_client import Client, SamplingParams
from tests.support.attribution import (
    PROMPT,
    STEP_S,
    STEP_US,
    Result,
    account,
    accounts,
    computing_us,
    greedy,
    in_parallel,
    parts_of,
    steps_us,
    timed,
)
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until


@contextmanager
def deployment(folder: Path, *worker_flags: str, core_flags: tuple[str, ...] = ()) -> Iterator[Any]:
    flags = ["--simulate", "--simulate-step-us", STEP_US, *worker_flags]
    with Cluster(folder, worker_flags=flags, core_flags=core_flags) as cluster:
        cluster.start()
        with Client(cluster.frontend_address()) as client:
            client.generate(PROMPT, greedy(2))  # connections are made, code is loaded
            yield cluster, client


def test_a_request_alone_spends_its_time_in_forward_passes(tmp_path: Path) -> None:
    with deployment(tmp_path) as (_, client):
        [timings] = accounts(lambda: [timed(lambda: client.generate(PROMPT, greedy(100)))])
    assert computing_us(timings) >= steps_us(100)
    parts = parts_of(timings)
    assert max(parts, key=parts.__getitem__) == "forward_us"
    assert (timings.preempted_us, timings.recovery_us, timings.unaccounted_us) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_time_after_a_preemption_is_told(tmp_path: Path, mode: str) -> None:
    """Blocks for one of the two to grow to its end, not for both."""
    core_flags = ("--preemption-mode", mode, "--no-enable-prefix-caching")
    flags = ("--block-size", "16", "--simulate-gpu-blocks", "12")
    with deployment(tmp_path, *flags, core_flags=core_flags) as (_, client):
        requests = [([index + 3, *PROMPT], greedy(90)) for index in range(2)]
        found = accounts(lambda: in_parallel(client, requests))
    preempted = sorted(timings.preempted_us for timings in found)
    assert preempted[0] == 0
    assert preempted[1] >= 5 * STEP_S * 1e6


def test_choices_and_beams_and_held_tokens_add_up(tmp_path: Path) -> None:
    with deployment(tmp_path) as (_, client):
        several = SamplingParams(n=3, max_tokens=40, ignore_eos=True, seed=1)
        accounts(lambda: [timed(lambda: client.generate(PROMPT, several))])
        best = SamplingParams(n=1, best_of=3, max_tokens=40, ignore_eos=True, seed=1)
        accounts(lambda: [timed(lambda: client.generate(PROMPT, best))])
        beams = SamplingParams(beam_width=3, max_tokens=40, ignore_eos=True)
        [timings] = accounts(lambda: [timed(lambda: client.generate(PROMPT, beams))])
        assert computing_us(timings) >= steps_us(40)
        started_at = time.perf_counter()
        held = client.generate_many([PROMPT] * 4, greedy(40))
        wall_s = time.perf_counter() - started_at
    for output in held:
        assert computing_us(account(output, wall_s)) >= steps_us(40)


def test_a_killed_worker_costs_recovery_and_the_rest_stays_true(tmp_path: Path) -> None:
    away_s = 0.0

    def killed_on_the_way() -> list[Result]:
        nonlocal away_s
        started_at = time.perf_counter()
        stream = client.stream(PROMPT, greedy(60))
        deltas = iter(stream)
        for _ in range(20):
            next(deltas)
        killed_at = time.perf_counter()
        cluster.workers[-1].kill()
        cluster.start_worker()
        next(deltas)
        away_s = time.perf_counter() - killed_at
        for _ in deltas:
            pass
        return [(stream.output, time.perf_counter() - started_at)]

    with deployment(tmp_path) as (cluster, client):
        [timings] = accounts(killed_on_the_way)
    assert timings.recovery_us >= 0.5 * away_s * 1e6
    assert computing_us(timings) >= steps_us(60)
    assert timings.unaccounted_us == 0


def test_a_killed_core_takes_its_account_along_and_says_so(tmp_path: Path) -> None:
    with deployment(tmp_path) as (cluster, client):
        started_at = time.perf_counter()
        stream = client.stream(PROMPT, greedy(60))
        deltas = iter(stream)
        for _ in range(20):
            next(deltas)
        lived_s = time.perf_counter() - started_at
        cluster.core.kill()
        cluster.start_core()
        wait_until(lambda: next(deltas, None) is not None, "the stream goes on")
        for _ in deltas:
            pass
        timings = account(stream.output, time.perf_counter() - started_at)
    assert timings.unaccounted_us >= 0.8 * lived_s * 1e6
    assert timings.recovery_us > 0
    assert computing_us(timings) >= steps_us(30)
