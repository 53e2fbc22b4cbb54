"""The model of this process, from its load to the end of its thread."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from worker_service.adapters.store import AdapterLoader
from worker_service.engine.executor import Executor, ModelFacts, ModelThread, Result
from worker_service.errors import NotReady

logger = logging.getLogger(__name__)

STOP_WAIT_S = 2.0
"""How long to wait for the model thread to finish its job; it may be stuck for ever."""


class ModelHost:
    """An executor and the thread on which it is called."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        """Used on the model thread only, except for its assets, adapters and `interrupt`."""
        self.thread = ModelThread()
        self.num_weight_loads = 0
        self.facts_if_loaded: ModelFacts | None = None
        """Facts about the loaded model; None before it is loaded."""
        self._preparation: str | None = None
        """What the model thread prepares, while it does. Set on that thread."""
        self._suspicion = asyncio.Event()

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model. Raises NotReady before it is loaded."""
        if self.facts_if_loaded is None:
            raise NotReady("the model is still loading")
        return self.facts_if_loaded

    async def load(self) -> None:
        """Load the model on the model thread; raises what the executor raises."""
        self.facts_if_loaded = await self.prepare("the load of the model", self.executor.load)
        self.num_weight_loads += 1

    async def prepare(self, what: str, work: Callable[[], Result]) -> Result:
        """Run `work` on the model thread, which may take minutes and continues there if the caller
        is cancelled; `stop` does not wait for it."""

        def run() -> Result:
            self._preparation = what
            try:
                return work()
            finally:
                self._preparation = None

        return await self.thread.run(run)

    def check_loaded(self) -> None:
        """Raise NotReady before the model is loaded."""
        _ = self.facts

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """(file name, content) of the model's files. Raises NotReady before it is loaded."""
        self.check_loaded()
        return self.executor.assets()

    @property
    def adapters(self) -> AdapterLoader[Any]:
        """Loads adapters, while steps continue. Raises NotReady before the model is loaded."""
        self.check_loaded()
        return self.executor.adapters

    def suspect_device(self) -> None:
        """Request a check of the device, after a failure that it may have caused."""
        self._suspicion.set()

    async def watch_device(self) -> NoReturn:
        """Check the device whenever that is requested. Raises DeviceLost if it is lost."""
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            await self.thread.run(self.executor.check_device)

    async def start_profile(self) -> None:
        """Begin a profiler trace of the model thread."""
        await self.thread.run(self.executor.start_profile)

    async def stop_profile(self) -> str:
        """End the trace. Returns the path of its file."""
        return await self.thread.run(self.executor.stop_profile)

    def stop(self) -> bool:
        """End the model thread. Returns whether it has ended, or prepares something, which is not
        waited for and ends with the process."""
        wait_s = STOP_WAIT_S if self._preparation is None else 0.0
        has_ended = self.thread.stop(wait_s=wait_s)
        if not has_ended and (what := self._preparation) is not None:
            logger.info("the process ends during %s", what)
            return True
        return has_ended
