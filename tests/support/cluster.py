"""Real services as real processes, on unix sockets in a test's own folder."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.waiting import wait_until
from tests.support.worker_flags import SMALL_CACHE
from tools import launch
from tools.launch import Service

SERVING = health_pb2.HealthCheckResponse.SERVING
READY = status_pb2.WORKER_STATE_READY
_END_TIMEOUT_S = 15.0


def health(address: str) -> int | None:
    """The overall health status at an address; None when nobody answers there."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=2).status
        except grpc.RpcError:
            return None


def _num_frontends(stub: SchedulerServiceStub, request: Any) -> int:
    try:
        return stub.GetStatus(request, timeout=2, wait_for_ready=True).status.num_frontends
    except grpc.RpcError:
        return 0


def end_all(services: Iterable[Service], timeout_s: float) -> None:
    """Send SIGTERM to all at once, SIGKILL to those that do not end in time."""
    services = list(services)
    for service in services:
        service.process.terminate()
    for service in services:
        service.wait_or_kill(timeout_s)


class Cluster:
    """A core, frontends and workers; a context manager that ends them all.

    Nothing is started until a `start_…` method is called, so that tests choose the order.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "embedded",
        worker_flags: Sequence[str] = (),
        core_flags: Sequence[str] = (),
        frontend_flags: Sequence[str] = (),
        variables: Callable[[str], Mapping[str, str]] | None = None,
    ) -> None:
        """`variables`: additional environment variables of a service, by its name."""
        self.folder = folder
        self.model = model
        self.worker_flags = list(worker_flags)
        self.core_flags = list(core_flags)
        self.frontend_flags = list(frontend_flags)
        self._variables = variables or (lambda name: {})
        self.core_address = f"unix:{folder}/core.sock"
        self.services: list[Service] = []
        self.core: Service | None = None
        self.workers: list[Service] = []
        self.frontends: list[Service] = []

    def _start(self, name: str, command: Sequence[str]) -> Service:
        log = self.folder / f"{name}.log"
        service = Service(name, command, log, self._variables(name))
        self.services.append(service)
        return service

    def frontend_address(self, index: int = 0) -> str:
        return f"unix:{self.folder}/frontend-{index}.sock"

    def http_url(self, index: int = 0) -> str:
        """HTTP address of a frontend that serves HTTP, from its log, once it listens there: it may
        do so after it serves gRPC."""
        frontend, line = self.frontends[index], re.compile(r"listening http=(\S+)\n")
        wait_until(lambda: line.search(frontend.log), "the frontend listens for HTTP")
        (found,) = line.findall(frontend.log)
        return f"http://{found}"

    def start_core(self) -> Service:
        self.core = self._start("core", launch.scheduler(self.core_address, *self.core_flags))
        return self.core

    def start_frontend(self) -> Service:
        self.frontends.append(self._start_frontend(len(self.frontends)))
        return self.frontends[-1]

    def _start_frontend(self, index: int) -> Service:
        address = self.frontend_address(index)
        command = launch.frontend(address, self.core_address, *self.frontend_flags)
        return self._start(f"frontend-{index}", command)

    def restart_frontend(self, index: int) -> Service:
        """Start a frontend that has ended again, at its address."""
        self.frontends[index] = self._start_frontend(index)
        return self.frontends[index]

    def start_worker(self, *flags: str) -> Service:
        index = len(self.workers)
        address = f"unix:{self.folder}/worker-{index}.sock"
        flags = ("--model", self.model, *SMALL_CACHE, *self.worker_flags, *flags)
        command = launch.worker(address, self.core_address, *flags)
        self.workers.append(self._start(f"worker-{index}", command))
        return self.workers[-1]

    def start_foreign_worker(self, command: Sequence[str]) -> Service:
        """Start a worker that is not ours; its flags must name the core's address."""
        self.workers.append(self._start(f"worker-{len(self.workers)}", command))
        return self.workers[-1]

    def start_program(self, command: Sequence[str]) -> Service:
        """Start another worker, a module and its arguments."""
        return self.start_foreign_worker(launch.module(*command))

    def start(self, *, num_workers: int = 1, num_frontends: int = 1) -> Self:
        """Start everything and wait until it serves."""
        self.start_core()
        for _ in range(num_frontends):
            self.start_frontend()
        for _ in range(num_workers):
            self.start_worker()
        self.wait_serving()
        for service in self.services:
            assert service.exit_code is None, f"{service.name} has ended\n{self.logs()}"
        return self

    def wait_serving(self, timeout_s: float = 120) -> None:
        """Wait until every frontend that runs can serve a model."""
        deadline = time.monotonic() + timeout_s
        for index, frontend in enumerate(self.frontends):
            while frontend.process.poll() is None:
                if health(self.frontend_address(index)) == SERVING:
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not serving after {timeout_s} s\n{self.logs()}")
                if all(worker.process.poll() is not None for worker in self.workers):
                    raise RuntimeError(f"no worker is alive\n{self.logs()}")
                time.sleep(0.05)

    def wait_attached(self, timeout_s: float = 60) -> None:
        """Wait until the core has a frontend, and so all its open requests."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.core_address) as channel:
            stub = SchedulerServiceStub(channel)
            request = scheduler_pb.SchedulerServiceGetStatusRequest()
            while not _num_frontends(stub, request):
                assert time.monotonic() < deadline, self.logs()
                time.sleep(0.02)

    def wait_num_ready(self, num_groups: int, timeout_s: float = 60) -> None:
        """Wait until `num_groups` worker groups execute steps."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.core_address) as channel:
            stub = SchedulerServiceStub(channel)
            request = scheduler_pb.SchedulerServiceGetStatusRequest()
            while True:
                groups = stub.GetStatus(request, timeout=60).status.groups
                if [group.state for group in groups].count(READY) == num_groups:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not {num_groups} groups after {timeout_s} s: {groups}")
                time.sleep(0.05)

    def logs(self) -> str:
        """The end of every service's log."""
        return "\n".join(f"--- {s.name}\n{s.log[-4000:]}" for s in self.services)

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what does not end."""
        end_all(reversed(self.services), _END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            print(self.logs())
        self.stop()
