"""Services forked from one process that has imported what they import.

Importing torch takes longer than all else that a small worker does at its start, and a suite starts
hundreds. `python -m tests.support.fork_server` is that process; its standard input is a socket of
requests. A fork runs `python -m MODULE` in its main thread and ends as any Python process does.
"""

import gc
import json
import os
import runpy
import select
import selectors
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

from tools.launch import Process, environment, start_process
from worker_service.cpu_cores import limit_spinning

_MODULES = ("scheduler_service", "worker_service", "tests.support.poisoned_worker")
"""What is forked; other commands are started as they are."""

_IMPORTED = (
    "scheduler_service.core_service.cli",
    "scheduler_service.frontend.cli",
    "transformers",
    "worker_service.launcher.launcher",
    "worker_service.runner.torch_executor",
    "worker_service.service.lifecycle",
    "worker_service.simulated.executor",
)
_MAX_REQUEST_BYTES = 1 << 17


class ForkServer:
    """Starts processes. A context manager, at whose end the server ends, if it was needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._its.close()
        if self._process is not None:
            self._process.wait()

    def start(
        self, command: Sequence[str], output: IO[bytes], variables: Mapping[str, str], folder: Path
    ) -> Process:
        """As `tools.launch.start_process`."""
        is_module = command[:2] == [sys.executable, "-m"] and command[2] in _MODULES
        # The others are read by libraries that are loaded already.
        is_ours = (name.startswith("PAGEWIRE_") or name == "PYTHONPATH" for name in variables)
        if not is_module or not all(is_ours):
            return start_process(command, output, variables, folder)
        request = {
            "module": command[2],
            "arguments": command[3:],
            "environment": environment() | dict(variables),
            "folder": str(folder),
        }
        if self._process is None:
            server = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(server, stdin=self._its, env=environment())
            self._its.close()
        status, its = os.pipe()
        message = json.dumps(request).encode()
        socket.send_fds(self._requests, [message], [output.fileno(), its])
        os.close(its)
        return _Fork(command, status)


class _Fork:
    """What `Process` is, of a process that is a child of the server."""

    def __init__(self, command: Sequence[str], status: int) -> None:
        """`status`: end of a pipe from which come its id and, when it has ended, its exit code."""
        self.returncode: int | None = None
        self._command = command
        self._status = status
        self.pid = self._read()

    def poll(self) -> int | None:
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = self._read()
            os.close(self._status)
        return self.returncode

    def _read(self) -> int:
        number = os.read(self._status, 4)
        if not number:
            raise RuntimeError("the fork server has ended")
        return int.from_bytes(number, signed=True)


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request, and report how forks end. Returns in the forks alone, with what was
    requested; exits when nobody can request any more."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not requests:
                    selector.unregister(key.fileobj)
                    _report_end(key.fd, *key.data)
                elif request := _fork(requests, selector):
                    return request


def _fork(requests: socket.socket, selector: selectors.BaseSelector) -> dict[str, Any] | None:
    message, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
    if not message:
        sys.exit()
    output, status = descriptors
    pid = os.fork()
    if pid:
        os.close(output)
        _write(status, pid)
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
        return None
    for key in list(selector.get_map().values()):
        if key.fileobj is not requests:
            os.close(key.fd)
            os.close(key.data[1])
    requests.close()
    os.close(status)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    request: dict[str, Any] = json.loads(message)
    return request


def _report_end(pidfd: int, pid: int, status: int) -> None:
    _write(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(status)
    os.close(pidfd)


def _write(pipe: int, number: int) -> None:
    os.write(pipe, number.to_bytes(4, signed=True))


def _main() -> None:
    limit_spinning(os.environ)
    for module in _IMPORTED:
        import_module(module)
    gc.freeze()
    request = _serve(socket.socket(fileno=os.dup(0)))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[1:] = request["arguments"]
    sys.path[1:1] = request["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
