"""More than a thousand requests of one client process, in a burst and over restarts of the one
frontend."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagewire_client import NO_RETRIES, AsyncClient, PagewireError, SamplingParams
from tests.support.cluster import Cluster

BURST_TOKENS = 4
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
    num_clients, num_requests = 3, 1500
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
