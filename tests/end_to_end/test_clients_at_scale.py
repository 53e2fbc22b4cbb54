"""Thousands of requests of one client process, in a burst and over restarts of the one frontend."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagewire_client import NO_RETRIES, AsyncClient, Client, PagewireError, SamplingParams
from tests.client.test_node_client import NODE_CLIENT
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

BURST_TOKENS = 4
FIRST_ABSENCE_S = 5.0
NUM_BLOCKS = 70_000
"""Of 16 tokens each: all sequences fit."""


@pytest.fixture
def step_us() -> int:
    return 10_000


@pytest.fixture
def cluster(tmp_path: Path, step_us: int) -> Iterator[Cluster]:
    with Cluster(
        tmp_path,
        core_flags=["--max-num-seqs", "1024", "--max-num-batched-tokens", "16384"],
        worker_flags=[
            *("--simulate", "--simulate-step-us", str(step_us)),
            *("--simulate-gpu-blocks", str(NUM_BLOCKS)),
        ],
    ) as cluster:
        yield cluster.start()


def prompt(index: int) -> list[int]:
    return [3 + index % 1000, 4 + index // 1000, 5, 6]


def params(index: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index)


async def tokens_of(client: AsyncClient, index: int, num_tokens: int) -> list[int] | PagewireError:
    try:
        output = await client.generate(prompt(index), params(index, num_tokens))
    except PagewireError as error:
        return error
    return output.outputs[0].token_ids


def assert_whole(answers: Sequence[list[int] | PagewireError], num_tokens: int) -> None:
    failed = [answer for answer in answers if isinstance(answer, PagewireError)]
    assert not failed, f"{len(failed)} of {len(answers)} failed, such as {failed[0]!r}"
    assert {len(answer) for answer in answers} == {num_tokens}  # type: ignore[arg-type]


async def test_a_burst_that_finds_the_frontend_busy_loses_nothing(cluster: Cluster) -> None:
    """All calls are there before the frontend takes in the first one. By default gRPC sheds from
    1,000 on, and a client without retries sees each of those."""
    num_clients, num_requests = 3, 2400
    frontend = cluster.frontends[0].process.pid
    clients = [
        AsyncClient(cluster.frontend_address(), retry=NO_RETRIES) for _ in range(num_clients)
    ]
    for client in clients:
        await client.get_model()
    os.kill(frontend, signal.SIGSTOP)
    try:
        answers = [
            asyncio.create_task(tokens_of(clients[i % num_clients], i, BURST_TOKENS))
            for i in range(num_requests)
        ]
        await asyncio.sleep(2)  # gRPC writes them
    finally:
        os.kill(frontend, signal.SIGCONT)
    assert_whole(await asyncio.gather(*answers), BURST_TOKENS)
    status = await clients[0].get_status()
    assert status.num_finished == num_requests, "each ran once"
    assert status.num_generated_tokens == num_requests * BURST_TOKENS
    for client in clients:
        await client.close()


async def answers_over_kills(
    cluster: Cluster, *, num_requests: int, num_tokens: int, num_kills: int, between_s: float
) -> list[list[int] | PagewireError]:
    """The answers to requests under which the one frontend is killed: first before it has accepted
    any of them, for some seconds, and then again and again."""
    async with AsyncClient(cluster.frontend_address()) as client:
        await client.get_model()
        os.kill(cluster.frontends[0].process.pid, signal.SIGSTOP)
        answers = [
            asyncio.create_task(tokens_of(client, index, num_tokens))
            for index in range(num_requests)
        ]
        await asyncio.sleep(0.5)
        for kill in range(num_kills):
            await asyncio.to_thread(cluster.frontends[0].kill)
            await asyncio.sleep(FIRST_ABSENCE_S if kill == 0 else 0)
            cluster.restart_frontend(0)
            await asyncio.sleep(between_s)
            ended = [answer.result() for answer in answers if answer.done()]
            assert not ended, f"{len(ended)} ended before the last kill, such as {ended[0]!r:.200}"
        return await asyncio.gather(*answers)


@pytest.mark.parametrize(
    ("num_requests", "step_us", "num_tokens", "num_kills", "between_s"),
    [
        (100, 10_000, 400, 2, 1.0),
        pytest.param(
            *(1000, 50_000, 1000, 12, 3.0), marks=[pytest.mark.long, pytest.mark.timeout(600)]
        ),
    ],
)
async def test_requests_survive_kills_of_the_only_frontend(
    cluster: Cluster, num_requests: int, num_tokens: int, num_kills: int, between_s: float
) -> None:
    answers = await answers_over_kills(
        cluster,
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_kills=num_kills,
        between_s=between_s,
    )
    assert_whole(answers, num_tokens)
    async with AsyncClient(cluster.frontend_address()) as client:
        undisturbed = await asyncio.gather(
            *(tokens_of(client, index, num_tokens) for index in range(num_requests))
        )
        status = await client.get_status()
    assert answers == undisturbed
    assert (status.num_running, status.num_waiting) == (0, 0)


NUM_NODE_REQUESTS = 200


def num_running(cluster: Cluster) -> int:
    with Client(cluster.frontend_address()) as client:
        return client.get_status().num_running


def node_requests(cluster: Cluster, num_tokens: int) -> "subprocess.Popen[str]":
    flags = ["--requests", str(NUM_NODE_REQUESTS), "--max-tokens", str(num_tokens)]
    command = ["node", "examples/many.js", "--address", cluster.frontend_address(), *flags]
    return subprocess.Popen(command, cwd=NODE_CLIENT, stdout=subprocess.PIPE, text=True)


def test_requests_of_a_node_client_survive_kills_of_the_only_frontend(cluster: Cluster) -> None:
    results = []
    for num_kills in (2, 0):
        with node_requests(cluster, num_tokens=500) as client:
            for _ in range(num_kills):
                wait_until(
                    lambda: num_running(cluster) > NUM_NODE_REQUESTS // 2, "most are running"
                )
                cluster.frontends[0].kill()
                assert client.poll() is None, "too short to be disturbed"
                cluster.restart_frontend(0)
                cluster.wait_serving()
            output, _ = client.communicate(timeout=120)
        results.append(json.loads(output))
    disturbed, undisturbed = results
    assert disturbed["failed"] == undisturbed["failed"] == 0, disturbed["error"]
    assert disturbed["digest"] == undisturbed["digest"]
