"""A core, frontends and workers, each on a host of its own, which can be restarted."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.status_pb2 import EngineStatus
from tests.chaos.namespaces import NamespaceNetwork
from tests.chaos.network import CLIENT, Network, role_of
from tests.chaos.ticks import ticks
from tests.chaos.timeline import Timeline
from tests.support.cluster import SERVING, health
from tools import launch
from tools.launch import ROOT, Service, environment

CORE = "core"
STORE_PORT = 29500
"""Of the store of a worker group's ranks."""

POLL_S = 0.2
START_TIMEOUT_S = 240.0
"""Time for a process to start on a busy machine."""
END_TIMEOUT_S = 120.0
"""Time for a process to stop in addition to its grace period."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options of the services other than addresses."""

    core: Sequence[str]
    frontend: Sequence[str]
    worker: Sequence[str]
    embedder: Sequence[str] = ()


class Member:
    """One host's service, whose processes follow one another."""

    def __init__(self, host: str, start: Callable[[], Service], address: str) -> None:
        """`address`: where the harness reaches it."""
        self.host = host
        self.role = role_of(host)
        self.address = address
        self.is_expected_to_run = False
        """Whether the end of its process would be a fault."""
        self._start = start
        self._service: Service | None = None

    def start(self) -> None:
        """Start a process; the former one must have ended."""
        assert self._service is None or self._service.process.poll() is not None
        self._service = self._start()
        self.is_expected_to_run = True

    @property
    def has_crashed(self) -> bool:
        """Whether its process has ended unexpectedly."""
        ended = self._service is not None and self._service.process.poll() is not None
        return ended and self.is_expected_to_run

    @property
    def has_drained(self) -> bool:
        """Whether it is a rank that ended because another rank of its group was asked to stop."""
        assert self._service is not None
        is_rank = self.host.count("-") == 2
        return is_rank and self.has_crashed and self._service.exit_code == 0

    @property
    def log(self) -> Path | None:
        """The log of all its processes."""
        return None if self._service is None else self._service.log_path

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process, which may end it."""
        assert self._service is not None
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.is_expected_to_run = False
        self._service.process.send_signal(number)

    async def wait_ended(self) -> int:
        """The exit code of a process that was asked to stop. Raises TimeoutError."""
        assert self._service is not None
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in ticks(POLL_S / 4):
                if (code := self._service.process.poll()) is not None:
                    break
        return code

    async def wait_ready(self) -> None:
        """Wait until its process is ready. Raises TimeoutError; returns if the process ends."""
        async with asyncio.timeout(START_TIMEOUT_S):
            async for _ in ticks(POLL_S):
                if self.has_crashed or await self._is_ready():
                    break

    async def _is_ready(self) -> bool:
        state = await asyncio.to_thread(health, self.address)
        # Whether the others can serve depends on other processes as well.
        return state == SERVING if self.role in ("worker", "embedder") else state is not None


class ChaosCluster:
    """All members, started by `async with` and killed at its end."""

    def __init__(self, network: Network, folder: Path, flags: Flags, timeline: Timeline) -> None:
        self.network = network
        self.timeline = timeline
        self._folder = folder
        self._flags = flags
        self.members = {host: self._make(host) for host in network.hosts}

    @property
    def frontend_addresses(self) -> list[str]:
        """Addresses for clients."""
        return [member.address for member in self.with_role("frontend")]

    def with_role(self, role: str) -> list[Member]:
        """All members of a role: core, frontend or worker."""
        return [member for member in self.members.values() if member.role == role]

    async def status(self) -> EngineStatus:
        """The core's status. Raises grpc.RpcError."""
        async with grpc.aio.insecure_channel(self.members[CORE].address) as channel:
            request = scheduler_pb.SchedulerServiceGetStatusRequest()
            answer = await SchedulerServiceStub(channel).GetStatus(request, timeout=60)
            status: EngineStatus = answer.status
            return status

    def tell_stacks(self) -> None:
        """Make every process log the stacks of its threads and tasks."""
        for member in self.members.values():
            if member.is_expected_to_run:
                member.send(signal.SIGUSR1)

    async def __aenter__(self) -> Self:
        for member in self.members.values():
            member.start()
        await asyncio.gather(*(member.wait_ready() for member in self.members.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members.values():
            member.send(signal.SIGKILL)
        await asyncio.gather(*(member.wait_ended() for member in self.members.values()))

    def _make(self, host: str) -> Member:
        def start() -> Service:
            command = [*self.network.program(host), *self._command(host)]
            return Service(host, command, self._folder / f"{host}.log", _variables())

        return Member(host, start, self.network.address(CLIENT, host))

    def _command(self, host: str) -> list[str]:
        listen, role = self.network.listen_address(host), role_of(host)
        if role == CORE:
            return launch.scheduler(listen, *self._flags.core)
        core = self.network.address(host, CORE)
        if role == "frontend":
            return launch.frontend(listen, core, *self._flags.frontend)
        if role == "embedder":
            flags = list(self._flags.embedder)
        else:
            flags = [*self._flags.worker, *self._place(host)]
        if not isinstance(self.network, NamespaceNetwork):  # there it finds its own address
            flags += ["--advertise", self.network.address(CORE, host)]
        return launch.worker(listen, core, *flags)

    def _place(self, host: str) -> list[str]:
        """The flags of a rank, on a host named worker-GROUP-RANK; none for a worker by itself."""
        _, _, place = host.partition("-")
        group, _, rank = place.partition("-")
        if not rank:
            return []
        assert isinstance(self.network, NamespaceNetwork)
        store = self.network.ip(f"worker-{group}-1", f"worker-{group}-0")
        init = ("--distributed-init", f"{store}:{STORE_PORT}")
        return ["--group-id", f"group-{group}", "--rank", rank, *init]


def _variables() -> dict[str, str]:
    """The environment in which each process runs `inside/sitecustomize.py` first."""
    inside = ROOT / "tests/chaos/inside"
    return {"PYTHONPATH": f"{inside}:{environment()['PYTHONPATH']}"}
