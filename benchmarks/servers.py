"""Servers of one model, each started as its users start it and loaded over loopback TCP."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import aiohttp

from benchmarks.engines import pagewire, vllm
from benchmarks.engines.engine import Settings
from benchmarks.processes import send_signal
from pagewire_cli.load import Arrival, PagewireTarget, Received, Target
from pagewire_client import NO_RETRIES, AsyncClient
from pagewire_client.errors import PagewireError
from tools.launch import free_port

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 30.0
POLL_S = 0.02
FIRST_REQUEST = Arrival(0.0, list(range(300, 316)), 1)


class Server(ABC):
    """A server process and its target; an asynchronous context manager, in which it is serving."""

    target: Target
    first_token_s: float
    """Seconds from the launch to the first token."""

    def __init__(
        self,
        name: str,
        *,
        port: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
    ) -> None:
        """It listens at `port` of this machine."""
        self.name = name
        self._port = port
        self._command = command
        self._environment = environment
        self._log = log

    @property
    def pid(self) -> int:
        """The process that was launched; all others descend from it."""
        return self._process.pid

    @asynccontextmanager
    async def launched(self) -> AsyncIterator[None]:
        """Launch the server, which may not be ready inside; it is gone after."""
        self._launch()
        try:
            async with self._open() as self.target:
                yield
        finally:
            await asyncio.to_thread(self._end)

    def _launch(self) -> None:
        with open(self._log or os.devnull, "wb") as log:
            self._launched_at = time.monotonic()
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def wait_ready(self) -> None:
        """Wait for a request's first token. Raises RuntimeError if the server ends instead."""
        last_error: Exception | None = None
        while time.monotonic() < self._launched_at + START_TIMEOUT_S:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"the server ended with {code}")
            # Dialling a port that is closed yet makes gRPC wait longer and longer.
            if _is_open(self._port):
                try:
                    async for _ in self.target.stream(FIRST_REQUEST):
                        self.first_token_s = time.monotonic() - self._launched_at
                    return
                except (PagewireError, aiohttp.ClientError, RuntimeError) as error:
                    last_error = error
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"{self.name} does not serve after {START_TIMEOUT_S:g} s: {last_error}")

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        """Run all requests together."""
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                group.create_task(self._finish(arrival))

    async def _finish(self, arrival: Arrival) -> None:
        async for _ in self.target.stream(arrival):
            pass

    @abstractmethod
    def _open(self) -> AbstractAsyncContextManager[Target]:
        """A connection to the server that has started."""

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            send_signal(self.pid, signal.SIGKILL)
            self._process.wait()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.launched())
            await self.wait_ready()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class ServedPagewire(Server):
    """`pagewire serve`: frontend, core and worker as processes, called over gRPC."""

    def __init__(self, settings: Settings, **more: object) -> None:
        """`more`: further flags of the services."""
        port = free_port()
        self._address = f"{HOST}:{port}"
        flags = pagewire.flags(settings) | {
            "model": settings.model(),
            "listen": self._address,
            "http": "off",
            "log_level": "warning",
            **more,
        }
        super().__init__(
            "pagewire",
            port=port,
            command=[sys.executable, "-m", "pagewire_cli", "serve", *vllm.options(flags)],
            # Its services import from the same folders.
            environment={"PYTHONPATH": ":".join(path for path in sys.path if path)},
            log=settings.log("pagewire"),
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Target]:
        async with AsyncClient(self._address, retry=NO_RETRIES) as client:
            yield PagewireTarget(client)


class OpenAITarget:
    """`POST /v1/completions` of a server, streamed, with the prompt as token ids."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        """See `pagewire_cli.load.Target`; a message counts as one token."""
        body = {
            "model": self._model,
            "prompt": arrival.prompt,
            "max_tokens": arrival.num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield Received(1)


class ServedVllm(Server):
    """`python -m vllm.entrypoints.openai.api_server` under the Python that has it."""

    def __init__(self, python: Path, settings: Settings) -> None:
        port = free_port()
        self._model = settings.model()
        command = vllm.server_command(python, settings, HOST, port)
        super().__init__(
            "vllm",
            port=port,
            command=[*command, "--disable-uvicorn-access-log"],
            environment=vllm.environment(python, settings),
            log=settings.log("vllm"),
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Target]:
        async with aiohttp.ClientSession(
            f"http://{HOST}:{self._port}", timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            yield OpenAITarget(session, self._model)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
