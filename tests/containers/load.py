"""Streams without end on a deployment, each compared with the answer of the same request alone."""

import asyncio
import threading
import time
from collections.abc import Sequence

from tests.chaos.streams import Streams, Tally, watch
from tests.chaos.timeline import Timeline
from tests.chaos.undisturbed import answers_of
from tests.chaos.workload import draw_asks

NUM_STREAMS = 40
NUM_ASKS = 60
MAX_TOKENS = 200
"""Of the requests drawn, those that end soon, so that many begin during a disturbance."""
PATIENCE_S = 120.0


class Load:
    """`NUM_STREAMS` streams at a time, in a thread of its own, between `start` and `stop`."""

    def __init__(self, frontends: Sequence[str]) -> None:
        """Asks the first of the frontends for the answers; nobody may disturb it meanwhile."""
        drawn = draw_asks(seed=1, count=4 * NUM_ASKS)
        self._asks = [ask for ask in drawn if (ask.params.max_tokens or 0) <= MAX_TOKENS][:NUM_ASKS]
        self._frontends = frontends
        expected = asyncio.run(answers_of(frontends[0], self._asks))
        self._timeline = Timeline()
        self._streams = Streams(self._asks, expected, self._timeline, max_open=NUM_STREAMS)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def tally(self) -> Tally:
        return self._streams.tally

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the open streams end."""
        self._streams.finish()
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive(), f"open streams: {self._streams.open}"

    def check(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until as many streams have ended as were open, and assert that none failed or
        differed."""
        wanted, deadline = self.tally.num_ended + NUM_STREAMS, time.monotonic() + timeout_s
        while self.tally.num_ended < wanted and not self._faults():
            assert self._thread.is_alive(), "the streams' thread has ended"
            assert time.monotonic() < deadline, f"no progress: {self._streams.open}"
            time.sleep(0.1)
        assert self._faults() == [], str(self._timeline)

    def _faults(self) -> list[str]:
        return self.tally.lost + self.tally.different + self.tally.hung

    async def _run(self) -> None:
        watching = asyncio.create_task(watch(self._streams, self._timeline, PATIENCE_S))
        await self._streams.run(self._frontends)
        watching.cancel()
