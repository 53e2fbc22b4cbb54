"""A deployment under load, with a dashboard: real services, simulated workers."""

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire_client import AsyncClient, SamplingParams
from tests.support.cluster import Cluster
from tools import launch
from tools.launch import Service, free_port

DETAIL = status_pb2.StatusDetail(include_requests=True, include_blocks=True)
Job = tuple[list[int], SamplingParams]


class Load:
    """Requests sent from a thread, each repeated when it has ended."""

    def __init__(self, address: str, jobs: Sequence[Job], *, pause_s: float = 0.0) -> None:
        self._address = address
        self._jobs = jobs
        self._pause_s = pause_s
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._send_all())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _send_all(self) -> None:
        async with AsyncClient(self._address) as client:
            await asyncio.gather(*(self._send(client, *job) for job in self._jobs))

    async def _send(self, client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
        draw = random.Random(len(prompt))
        while True:
            await client.generate(prompt, params)
            await asyncio.sleep(self._pause_s * draw.random())


class Deployment:
    """Core, frontend and simulated workers."""

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        *,
        worker_flags: Sequence[str],
        pause_s: float = 0.0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.cluster = Cluster(
            folder,
            core_flags=["--grace-period", "0"],
            frontend_flags=["--http", f"127.0.0.1:{self.port}", "--grace-period", "0"],
        )
        self._worker_flags = ["--simulate", *worker_flags]
        self._jobs = jobs
        self._pause_s = pause_s
        self._load: Load | None = None

    def start(self, num_workers: int) -> None:
        self.cluster.start_core()
        self.cluster.start_frontend()
        for index in range(num_workers):
            self.start_worker(f"worker-{index}")
        self.cluster.wait_serving()
        self.cluster.wait_num_ready(num_workers)
        self._load = Load(self.cluster.frontend_address(), self._jobs, pause_s=self._pause_s)
        self._load.start()

    def start_worker(self, group_id: str) -> Service:
        """A simulated worker that is a group of its own."""
        address = f"unix:{self.cluster.folder}/{group_id}-{len(self.cluster.services)}.sock"
        flags = ["--group-id", group_id, *self._worker_flags]
        command = launch.worker(address, self.cluster.core_address, *flags)
        service = self.cluster._start(group_id, command)
        self.cluster.workers.append(service)
        return service

    def status(self) -> status_pb2.EngineStatus:
        """The core's status."""
        with grpc.insecure_channel(self.cluster.core_address) as channel:
            request = pb.SchedulerServiceGetStatusRequest(detail=DETAIL)
            return SchedulerServiceStub(channel).GetStatus(request, timeout=60).status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            print(self.cluster.logs())
        if self._load is not None:
            self._load.stop()
        self.cluster.stop()
