"""The answers of an undisturbed deployment with enough memory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.clients import clients
from tests.chaos.comparison import Answer, answer_of
from tests.chaos.workload import Ask
from tests.support.cluster import Cluster

MAX_OPEN = 32


async def run_undisturbed(
    asks: Sequence[Ask], worker_flags: Sequence[str], folder: Path
) -> list[Answer]:
    """In their order, of one worker; its log is kept in a folder of its own."""
    quiet = folder / "undisturbed"
    quiet.mkdir()
    cluster = Cluster(quiet, worker_flags=worker_flags)
    try:
        await asyncio.to_thread(cluster.start)
        return await answers_of(cluster.frontend_address(), asks)
    finally:
        await asyncio.to_thread(cluster.stop)


async def answers_of(frontend: str, asks: Sequence[Ask]) -> list[Answer]:
    """The answers of a deployment that nobody disturbs."""
    places = asyncio.Semaphore(MAX_OPEN)
    async with clients([frontend]) as [client]:

        async def answer(ask: Ask) -> Answer:
            async with places:
                return answer_of(await client.generate(ask.prompt, ask.params))

        return list(await asyncio.gather(*map(answer, asks)))
