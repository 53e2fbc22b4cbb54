"""Any process can be killed while thousands of texts are embedded: each gets the vector that it
would have had, bit for bit."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagewire_client import AsyncClient
from tests.support.cluster import Cluster
from tests.support.worker_flags import FLOAT32

NUM_CALLS, PER_CALL = 5, 20
"""Calls of a client, and texts in each of them."""


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Cluster]:
    flags = ["--runner", "pooling", *FLOAT32, "--threads", "1"]
    with Cluster(tmp_path, worker_flags=flags) as victims:
        yield victims.start(num_workers=2, num_frontends=2)


class Run:
    """One call with all texts, and clients that embed parts of them in several calls."""

    def __init__(self, victims: Cluster, num_clients: int) -> None:
        self.num_clients = num_clients
        num_texts = num_clients * NUM_CALLS * PER_CALL
        self.texts = [f"Text {i}: " + "one more word, " * (i % 7) for i in range(num_texts)]
        self._victims = victims
        self._addresses = [victims.frontend_address(index) for index in range(2)]
        self._num_ended = 0
        self._ended = asyncio.Condition()

    async def all_at_once(self) -> np.ndarray:
        async with AsyncClient(self._addresses) as client:
            return await client.embed(self.texts)

    async def in_parts(self, number: int) -> np.ndarray:
        first = number * NUM_CALLS * PER_CALL
        found = []
        async with AsyncClient(self._addresses[:: (-1) ** number]) as client:
            for start in range(first, first + NUM_CALLS * PER_CALL, PER_CALL):
                found.append(await client.embed(self.texts[start : start + PER_CALL]))
                async with self._ended:
                    self._num_ended += 1
                    self._ended.notify_all()
        return np.concatenate(found)

    async def disturb(self) -> None:
        """Kill a process whenever another eighth of the clients' calls has ended."""
        for turn, kill in enumerate([self._worker, self._core, self._frontend, self._core]):
            async with self._ended:
                num_calls = (1 + turn) * self.num_clients * NUM_CALLS // 8
                await self._ended.wait_for(lambda num=num_calls: self._num_ended >= num)
            kill()

    def _worker(self) -> None:
        self._victims.workers[0].kill()

    def _core(self) -> None:
        assert self._victims.core is not None
        self._victims.core.kill()
        self._victims.start_core()

    def _frontend(self) -> None:
        self._victims.frontends[0].kill()
        self._victims.restart_frontend(0)


@pytest.mark.parametrize("num_clients", [20, pytest.param(100, marks=pytest.mark.long)])
async def test_no_text_is_lost_or_different_whatever_is_killed(
    num_clients: int, victims: Cluster
) -> None:
    run = Run(victims, num_clients)
    async with AsyncClient(victims.frontend_address()) as client:
        expected = await client.embed(run.texts)
    clients = [run.in_parts(number) for number in range(num_clients)]
    at_once, _, *parts = await asyncio.gather(run.all_at_once(), run.disturb(), *clients)
    assert at_once.tobytes() == expected.tobytes()
    assert np.concatenate(parts).tobytes() == expected.tobytes()
