"""What real workers have computed is not computed again: after a drain, and after the core's
death."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from pagewire_client import AsyncClient, SamplingParams
from tests.support.cluster import Cluster
from tests.support.worker_flags import FLOAT32

NUM_STREAMS = 6
NUM_TOKENS = 300
BEFORE = 20
"""Tokens of every stream before something happens."""
PROMPT_TOKENS = 300
UNRECORDED = 16
"""Tokens of a stream that a core's death may cost: those of its last block, if workers have
computed more of it than streams have received."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    flags = [*FLOAT32, "--threads", "1"]
    with Cluster(tmp_path, worker_flags=flags, core_flags=["--move-kv", "always"]) as cluster:
        cluster.start()
        cluster.wait_num_ready(1)
        yield cluster


async def answers(
    client: AsyncClient, happen: Callable[[], Awaitable[None]] | None = None
) -> list[list[int]]:
    """The tokens of some streams, while all of which something happens."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def read(number: int) -> list[int]:
        prompt = [10 + (7 * number + at) % 900 for at in range(PROMPT_TOKENS)]
        params = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.8, seed=number, ignore_eos=True
        )
        num_tokens = 0
        async with aclosing(client.stream(prompt, params)) as stream:
            async for delta in stream:
                num_tokens += len(delta.token_ids)
                if num_tokens >= BEFORE:
                    begun[number].set()
            return list(stream.output.outputs[0].token_ids)

    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read(number)) for number in range(NUM_STREAMS)]
        for event in begun:
            await event.wait()
        if happen is not None:
            await happen()
    return [reader.result() for reader in readers]


async def run_drain(cluster: Cluster) -> None:
    async with AsyncClient(cluster.frontend_address()) as client:
        expected = await answers(client)
        cluster.start_worker()
        await asyncio.to_thread(cluster.wait_num_ready, 2)
        before = 0

        async def end_first_worker() -> None:
            nonlocal before
            before = (await client.get_status()).num_prefill_tokens
            cluster.workers[0].process.terminate()

        assert await answers(client, end_first_worker) == expected
        status = await client.get_status()
        # The next token of each stream needs the last one to be computed, which it is anyway.
        assert status.num_prefill_tokens - before <= NUM_STREAMS
        assert status.num_fetched_blocks > 0
        assert status.num_failed_fetches == 0


def test_a_drained_worker_leaves_nothing_to_compute_again(cluster: Cluster) -> None:
    asyncio.run(run_drain(cluster))
    assert cluster.workers[0].process.wait(60) == 0


async def run_loss_of_core(cluster: Cluster) -> None:
    async with AsyncClient(cluster.frontend_address()) as client:
        expected = await answers(client)

        async def restart_core() -> None:
            assert cluster.core is not None
            cluster.core.kill()
            cluster.start_core()

        assert await answers(client, restart_core) == expected
        num_again = (await client.get_status()).num_prefill_tokens
        assert num_again <= NUM_STREAMS * UNRECORDED


def test_a_core_that_dies_leaves_what_workers_have_computed(cluster: Cluster) -> None:
    asyncio.run(run_loss_of_core(cluster))
