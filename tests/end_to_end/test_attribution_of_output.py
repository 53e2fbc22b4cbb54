"""Timings add up to what clients waited for also with constraints, which frontend and worker have
work with, and over HTTP, whose answers have no timings and are held to the metrics."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pagewire_client import Client
from tests.support.attribution import (
    CALL_S,
    MAX_TRIES,
    PROMPT,
    STEP_US,
    TOLERANCE,
    accounts,
    computing_us,
    greedy,
    in_parallel,
    timed,
)
from tests.support.cluster import Cluster
from tests.support.scrapes import scrape

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
        "required": ["n"],
        "additionalProperties": False,
    }
)


def test_structured_output_adds_up_alone_and_beside_others(cluster: Cluster) -> None:
    """A constraint is checked at the frontend, compiled and followed at the worker."""
    params = greedy(80, json_schema=SCHEMA)
    with Client(cluster.frontend_address()) as client:
        client.generate(PROMPT, params)  # compiled from now on
        [timings] = accounts(lambda: [timed(lambda: client.generate(PROMPT, params))])
        assert computing_us(timings) > 0.3 * timings.total_us
        requests = [(PROMPT, params), ([70, *PROMPT], greedy(80)), ([71, *PROMPT], params)]
        assert len(accounts(lambda: in_parallel(client, requests))) == 3


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With HTTP and metrics."""
    frontend_flags = ["--http", "127.0.0.1:0", "--metrics-port", "0"]
    worker_flags = ["--simulate", "--simulate-step-us", STEP_US]
    folder: Path = tmp_path_factory.mktemp("http")
    with Cluster(folder, worker_flags=worker_flags, frontend_flags=frontend_flags) as cluster:
        yield cluster.start()


def test_an_http_streams_parts_add_up_in_the_metrics(simulated: Cluster) -> None:
    gaps = []
    with httpx.Client(base_url=simulated.http_url(), timeout=60) as client:
        streamed_s(client, 2)  # the connection is made, code is loaded
        for _ in range(MAX_TRIES):
            before = parts_s(simulated)
            wall_s = streamed_s(client, 200)
            total_s = parts_s(simulated) - before
            assert total_s <= wall_s
            gaps.append(1 - (total_s + CALL_S) / wall_s)
            if gaps[-1] <= TOLERANCE:
                return
    raise AssertionError(f"no total within {TOLERANCE:.0%} of what the client waited: {gaps}")


def streamed_s(client: httpx.Client, num_tokens: int) -> float:
    """Seconds that a client waits for a stream of `num_tokens` tokens."""
    body = {"model": "simulated", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    started_at = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    return time.perf_counter() - started_at


def parts_s(cluster: Cluster) -> float:
    """All requests' time by the metrics, in seconds."""
    return scrape(cluster.frontends[0]).sum("pagewire_request_part_seconds_sum")
