"""Servers as their users start them, from their launch on: for what a start takes."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.checkpoints import checkpoint
from benchmarks.engines import pagewire, vllm
from benchmarks.engines.engine import Settings
from benchmarks.processes import free_port, send_signal
from benchmarks.workloads import Job
from pagewire_client import NO_RETRIES, Client, SamplingParams
from pagewire_client.errors import PagewireError

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
POLL_S = 0.02
END_TIMEOUT_S = 30.0
FIRST_PROMPT = list(range(300, 316))


class Server(ABC):
    """A command that is tried until it answers.

    A context manager: launched when entered, not yet ready; gone after.
    """

    name: str

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None
    ) -> None:
        self._command = command
        self._environment = environment
        self._log = log

    @property
    def pid(self) -> int:
        """The process that was launched; all others descend from it."""
        return self._process.pid

    def first_token(self) -> float:
        """Wait for a request's first token; seconds since the launch."""
        while time.monotonic() < self._launched_at + START_TIMEOUT_S:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"{self.name} ended with {code}")
            if self._generates():
                return time.monotonic() - self._launched_at
            time.sleep(POLL_S)
        raise RuntimeError(f"{self.name} does not serve after {START_TIMEOUT_S:g} s")

    @abstractmethod
    def run(self, jobs: list[Job]) -> None:
        """Run all jobs together."""

    @abstractmethod
    def _generates(self) -> bool:
        """Whether it answers a request with a token."""

    def __enter__(self) -> Self:
        with open(self._log or os.devnull, "w") as log:
            self._launched_at = time.monotonic()
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            send_signal(self._process.pid, signal.SIGKILL)
            self._process.wait()


class PagewireServer(Server):
    """`pagewire serve`: frontend, core and worker, called over gRPC."""

    name = "pagewire"

    def __init__(self, settings: Settings) -> None:
        self._address = f"{HOST}:{free_port()}"
        model = checkpoint(settings.shape, settings.dtype, settings.checkpoints)
        flags = {"model": model, "listen": self._address, "http": "off"} | pagewire.flags(settings)
        command = [sys.executable, "-m", "pagewire_client.cli", "serve", *_options(flags)]
        # Its services import what we do.
        environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
        super().__init__(command, environment, settings.log("pagewire_serve"))

    def _generates(self) -> bool:
        # Dialling an address where nobody listens yet makes gRPC wait longer and longer.
        if not _is_open(self._address):
            return False
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
        try:
            with Client(self._address, retry=NO_RETRIES) as client:
                return bool(client.generate(FIRST_PROMPT, params).outputs[0].token_ids)
        except PagewireError:
            return False

    def run(self, jobs: list[Job]) -> None:
        """Run all jobs together."""
        with Client(self._address) as client:
            client.generate_many(
                [job.prompt for job in jobs],
                [
                    SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.num_output_tokens)
                    for job in jobs
                ],
            )


class VllmServer(Server):
    """vLLM's API server, called over HTTP."""

    name = "vllm"

    def __init__(self, python: Path, settings: Settings) -> None:
        self._port = free_port()
        self._model = str(checkpoint(settings.shape, settings.dtype, settings.checkpoints))
        command = vllm.server_command(python, settings, self._model, HOST, self._port)
        super().__init__(command, vllm.environment(python, settings), settings.log("vllm_serve"))

    def _generates(self) -> bool:
        try:
            return bool(self._complete(Job(prompt=FIRST_PROMPT, num_output_tokens=1)))
        except OSError:
            return False

    def run(self, jobs: list[Job]) -> None:
        """Run all jobs together."""
        with ThreadPoolExecutor(len(jobs)) as clients:
            list(clients.map(self._complete, jobs))

    def _complete(self, job: Job) -> Any:
        request = {
            "model": self._model,
            "prompt": job.prompt,
            "max_tokens": job.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(request), headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"vllm: {response.status} {answer!r}")
        return json.loads(answer)["choices"]


def _options(flags: Mapping[str, object]) -> list[str]:
    """As a command line has them."""
    return [part for name, value in flags.items() for part in (_option(name), str(value))]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
