"""A Ray cluster of nodes on this machine, each a process that holds the node's others."""

import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tools.launch import Service
from worker_service.launcher.launcher import free_port

PROGRAM = (
    "env",
    "RAY_memory_monitor_refresh_ms=0",  # other processes' memory is no reason to kill a rank
    # A node that is starved of CPU is no dead one; a dead one refuses connections.
    "RAY_health_check_timeout_ms=120000",
    "RAY_health_check_period_ms=1000",
    "RAY_worker_register_timeout_seconds=300",
    sys.executable,
    "-m",
)


class RayNodes:
    """Two nodes; a context manager that ends them."""

    def __init__(self, *, cpus_of_head: int, cpus_of_other: int) -> None:
        # Not a test's own folder: the names of Ray's sockets are long, and 107 bytes are the limit.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self._nodes: list[Service] = []
        self._cpus = (cpus_of_head, cpus_of_other)
        self.address = ""

    def __enter__(self) -> Self:
        try:
            head = self._start("head", self._cpus[0], "--head", "--port=0", self._session())
            self.address = _wait_for(head, r"ray start --address='(\S+)'")
            other = self._start("other", self._cpus[1], f"--address={self.address}")
            _wait_for(other, r"(Ray runtime started)")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def lose_other(self) -> None:
        """Kill all processes of the node that is not the head."""
        node = self._nodes.pop()
        for process in psutil.Process(node.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()

    def stop(self) -> None:
        """End all nodes and their processes."""
        while self._nodes:
            node = self._nodes.pop()
            node.process.terminate()
            node.process.wait(timeout=60)
        self._folder.cleanup()

    def _session(self) -> str:
        return f"--temp-dir={self._folder.name}/s"

    def _start(self, name: str, num_cpus: int, *flags: str) -> Service:
        command = ["ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--num-cpus={num_cpus}", "--num-gpus=0", "--object-store-memory=78643200"]
        if "--head" in flags:
            port = free_port("127.0.0.1")
            command += ["--include-dashboard=false", f"--ray-client-server-port={port}"]
        log = Path(self._folder.name) / f"{name}.log"
        node = Service(name, [*PROGRAM, *command, *flags], log)
        self._nodes.append(node)
        return node


def _wait_for(node: Service, pattern: str, timeout_s: float = 120) -> str:
    deadline = time.monotonic() + timeout_s
    while (found := re.search(pattern, node.log)) is None:
        assert node.process.poll() is None, node.log
        assert time.monotonic() < deadline, node.log
        time.sleep(0.1)
    return found[1]
