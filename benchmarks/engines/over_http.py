"""Servers as engines: driven as clients of OpenAI's interface drive them, over HTTP on loopback."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self

from benchmarks.engines.engine import About, Outputs
from benchmarks.engines.openai_target import OpenAITarget
from benchmarks.engines.servers import Server
from benchmarks.engines.workloads import Job


class OverHTTP:
    """A server that is called over HTTP, with a streamed completion for each job. Its clock
    includes the client and the wire."""

    def __init__(self, server: Server, settings: dict[str, Any]) -> None:
        """settings: those that are reported, without the model's path."""
        self.name = server.name
        named = {name: value for name, value in settings.items() if name != "model"}
        self.about = About(version="", settings=named)
        self._server = server
        self._runner = asyncio.Runner()

    @property
    def pids(self) -> list[int]:
        """The process that was launched."""
        return [self._server.pid]

    def run(self, jobs: list[Job]) -> Outputs:
        """Run all jobs together."""
        began = time.perf_counter()
        token_ids = self._runner.run(self._complete(jobs))
        return Outputs(token_ids=token_ids, seconds=time.perf_counter() - began)

    async def _complete(self, jobs: Sequence[Job]) -> list[list[int]]:
        target = self._target
        return await asyncio.gather(
            *(target.complete(job.prompt, job.num_output_tokens) for job in jobs)
        )

    def pause(self) -> None:
        """Suspend its processes, if idle ones take time."""
        self._server.pause()

    def resume(self) -> None:
        """Resume them."""
        self._server.resume()

    @property
    def _target(self) -> OpenAITarget:
        target = self._server.target
        assert isinstance(target, OpenAITarget)
        return target

    def __enter__(self) -> Self:
        try:
            version = self._runner.run(self._start())
        except BaseException:
            self._runner.close()  # ends the server if this was interrupted
            raise
        self.about = About(version=version, settings=self.about.settings)
        return self

    async def _start(self) -> str:
        """Start the server; returns its version."""
        await self._server.__aenter__()
        return await self._target.version()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._server.__aexit__())
        self._runner.close()
