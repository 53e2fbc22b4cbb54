"""Servers that the online benchmark loads, each started as its users start it.

Both serve the same checkpoint on loopback TCP. While one is loaded the other is idle.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, Self

import aiohttp

from benchmarks.checkpoints import checkpoint
from benchmarks.engines import pagewire, vllm
from benchmarks.engines.engine import Settings
from benchmarks.openai_target import OpenAITarget
from benchmarks.processes import free_port, send_signal
from pagewire_client import NO_RETRIES, AsyncClient
from pagewire_client.bench import PagewireTarget, Target
from pagewire_client.local import LocalServices

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
_POLL_S = 0.2


class Server(Protocol):
    """Something that serves one model; an asynchronous context manager."""

    name: str
    interface: str
    """How it is spoken to."""
    target: Target

    def pause(self) -> None:
        """Take no more processor time until `resume`, if it takes any when idle."""
        ...

    def resume(self) -> None:
        """Be ready for requests."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class ServedPagewire:
    """`pagewire serve`: frontend, core and worker as processes, called by OpenAI's interface over
    HTTP or by our own over gRPC."""

    def __init__(self, settings: Settings, interface: str = "HTTP") -> None:
        self.interface = interface
        self.name = "pagewire" if interface == "HTTP" else f"pagewire {interface}"
        self._model = checkpoint(settings.shape, settings.dtype, settings.checkpoints)
        self._services = LocalServices(
            str(self._model),
            engine_flags=pagewire.flags(settings) | {"log_level": "warning"},
            listen=f"{HOST}:{free_port()}",
            http=f"{HOST}:{free_port()}" if interface == "HTTP" else None,
        )

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._services.start, START_TIMEOUT_S)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._services.stop)
            self.target = await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> Target:
        http = self._services.http_address
        if http is not None:
            target = OpenAITarget(f"http://{http}", self._model.name)
            return await stack.enter_async_context(target)
        client = AsyncClient(self._services.addresses[0], retry=NO_RETRIES)
        return PagewireTarget(await stack.enter_async_context(client))

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def pause(self) -> None:
        """It does nothing when idle, and a stopped worker would lose its lease."""

    def resume(self) -> None:
        """Nothing to do."""


class ServedVllm:
    """`python -m vllm.entrypoints.openai.api_server` under the Python that has it."""

    name = "vllm"
    interface = "HTTP"

    def __init__(self, python: Path, settings: Settings) -> None:
        self._port = free_port()
        self._model = checkpoint(settings.shape, settings.dtype, settings.checkpoints)
        command = vllm.server_command(python, settings, self._model, HOST, self._port)
        self._command = [*command, "--disable-uvicorn-access-log"]
        self._environment = vllm.environment(python, settings)
        self._log = settings.log(self.name)

    async def __aenter__(self) -> Self:
        self._process = _spawn(self._command, self._environment, self._log)
        url = f"http://{HOST}:{self._port}"
        self._stack = AsyncExitStack()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _wait_healthy(url, self._process)
        except BaseException:
            _end(self._process)
            raise
        self.target: Target = await self._stack.enter_async_context(
            OpenAITarget(url, str(self._model))
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.resume()
        await self._stack.aclose()
        await asyncio.to_thread(_end, self._process)

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def pause(self) -> None:
        """Stop its processes: idle threads of OpenMP spin."""
        send_signal(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        send_signal(self.pid, signal.SIGCONT)


@asynccontextmanager
async def all_of(servers: Sequence[Server]) -> AsyncIterator[None]:
    """All servers, started one after the other, each paused when it has."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
            server.pause()
        yield


def _spawn(
    command: Sequence[str | Path], environment: dict[str, str], log: Path | None
) -> "subprocess.Popen[bytes]":
    """The process, at the head of a session of its own."""
    with open(log or os.devnull, "wb") as output:
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


async def _wait_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    async with aiohttp.ClientSession(url) as session:
        while process.poll() is None:
            try:
                async with session.get("/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(_POLL_S)
    raise RuntimeError(f"the server ended with {process.returncode}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        send_signal(process.pid, signal.SIGKILL)
        process.wait()
