"""The answers of an undisturbed deployment with enough memory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagewire_client import AsyncClient
from tests.chaos.clients import clients
from tests.chaos.comparison import Answer, answer_of
from tests.chaos.workload import EMBEDDER, Ask
from tests.support.cluster import Cluster

MAX_OPEN = 32
ENOUGH_MEMORY = ("--kv-cache-memory", "128MiB")


async def run_undisturbed(
    asks: Sequence[Ask],
    worker_flags: Sequence[str],
    folder: Path,
    texts: Sequence[str] = (),
    embedder_flags: Sequence[str] = (),
) -> tuple[list[Answer], list[bytes]]:
    """The answers and the vectors, in their order, of one worker for either; their logs are kept in
    a folder of its own."""
    quiet = folder / "undisturbed"
    quiet.mkdir()
    cluster = Cluster(quiet, worker_flags=[*ENOUGH_MEMORY, *worker_flags])
    try:
        await asyncio.to_thread(cluster.start)
        answers = await answers_of(cluster.frontend_address(), asks)
        if not texts:
            return answers, []
        await asyncio.to_thread(cluster.start_worker, *embedder_flags)
        await asyncio.to_thread(cluster.wait_num_ready, 2)
        async with clients([cluster.frontend_address()]) as [client]:
            return answers, await vectors_of(client, texts)
    finally:
        await asyncio.to_thread(cluster.stop)


async def vectors_of(client: AsyncClient, texts: Sequence[str]) -> list[bytes]:
    """The bits of the texts' vectors. Raises PagewireError if one of them fails."""
    vectors = await client.embed(texts, model=EMBEDDER)
    return [np.asarray(vector).tobytes() for vector in vectors]


async def answers_of(frontend: str, asks: Sequence[Ask]) -> list[Answer]:
    """The answers of a deployment that nobody disturbs."""
    places = asyncio.Semaphore(MAX_OPEN)
    async with clients([frontend]) as [client]:

        async def answer(ask: Ask) -> Answer:
            async with places:
                return answer_of(await client.generate(ask.prompt, ask.params, lora=ask.adapter))

        return list(await asyncio.gather(*map(answer, asks)))
