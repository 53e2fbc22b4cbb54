"""Servers of one model, each started as its users start it and loaded over loopback TCP."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import aiohttp

from benchmarks.engines import pagewire, vllm
from benchmarks.engines.engine import Settings
from benchmarks.engines.openai_target import OpenAITarget
from benchmarks.measuring.processes import send_signal
from pagewire_cli.load.load_generator import PagewireTarget, Target
from pagewire_cli.load.workload import Arrival
from pagewire_client import NO_RETRIES, AsyncClient
from pagewire_client.errors import PagewireError
from tools.launch import free_port

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 30.0
POLL_S = 0.02
FIRST_REQUEST = Arrival(0.0, list(range(300, 316)), 1)


class Server(ABC):
    """A server process and its target; an asynchronous context manager, in which it is serving.

    While another server is loaded, a paused one takes no processor time.
    """

    target: Target
    first_token_s: float
    """Seconds from the launch to the first token."""

    def __init__(
        self,
        name: str,
        interface: str,
        *,
        port: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
    ) -> None:
        """`interface`: HTTP or gRPC, at `port` of this machine."""
        self.name = name
        self.interface = interface
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
            self.resume()
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

    def pause(self) -> None:
        """Stop its processes: idle threads of OpenMP spin."""
        send_signal(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue its processes."""
        send_signal(self.pid, signal.SIGCONT)

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
    """`pagewire serve`: frontend, core and worker as processes, called by OpenAI's interface over
    HTTP or by our own over gRPC."""

    def __init__(self, settings: Settings, interface: str = "HTTP", **more: object) -> None:
        """`more`: further flags of the services."""
        self._model = settings.model()
        grpc, http = (f"{HOST}:{free_port()}" for _ in range(2))
        self._address = http if interface == "HTTP" else grpc
        name = "pagewire" if interface == "HTTP" else f"pagewire {interface}"
        flags = pagewire.flags(settings) | {
            "model": self._model,
            "listen": grpc,
            "http": http if interface == "HTTP" else "off",
            "log_level": "warning",
            **more,
        }
        super().__init__(
            name,
            interface,
            port=int(self._address.rpartition(":")[2]),
            command=[sys.executable, "-m", "pagewire_cli", "serve", *vllm.options(flags)],
            # Its services import from the same folders.
            environment={"PYTHONPATH": ":".join(path for path in sys.path if path)},
            log=settings.log(name.replace(" ", "_")),
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Target]:
        if self.interface == "HTTP":
            async with OpenAITarget(f"http://{self._address}", self._model) as target:
                yield target
        else:
            async with AsyncClient(self._address, retry=NO_RETRIES) as client:
                yield PagewireTarget(client)

    def pause(self) -> None:
        """Do nothing: it is idle without requests, and a stopped worker would lose its lease."""


class ServedVllm(Server):
    """`python -m vllm.entrypoints.openai.api_server` under the Python that has it."""

    def __init__(self, python: Path, settings: Settings) -> None:
        port = free_port()
        self._model = settings.model()
        command = vllm.server_command(python, settings, HOST, port)
        super().__init__(
            "vllm",
            "HTTP",
            port=port,
            command=[*command, "--disable-uvicorn-access-log"],
            environment=vllm.environment(python, settings),
            log=settings.log("vllm"),
        )

    def _open(self) -> AbstractAsyncContextManager[Target]:
        return OpenAITarget(f"http://{HOST}:{self._port}", self._model)


@asynccontextmanager
async def all_of(servers: Sequence[Server]) -> AsyncIterator[None]:
    """All servers, started one after the other, each paused once it is ready."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
            server.pause()
        yield


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
