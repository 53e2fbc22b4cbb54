"""A scheduler core and a growing number of simulated workers as processes on unix sockets, and
their load."""

import asyncio
from array import array
from pathlib import Path
from typing import Any, Self

import grpc

from benchmarks.processes import processor_seconds
from pagewire.v1 import sampling_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire_cli.local import service_commands
from pagewire_cli.local.runtime_directory import RuntimeDirectory
from pagewire_cli.local.service_process import ServiceProcess
from service_common.grpc_options import channel_options

MODEL = "simulated"
START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0


class CoreAndWorkers:
    """An asynchronous context manager; there are no workers before `grow`."""

    def __init__(
        self,
        *,
        step_us: int,
        max_num_seqs: int,
        checks_plans: bool = True,
        num_gpu_blocks: int = 16384,
    ) -> None:
        """`step_us`: duration of every step. `checks_plans`: whether workers are simulated ones,
        with a process each, or `null_workers`, of which several share a process."""
        self._folder = RuntimeDirectory()
        self._step_us = step_us
        self._checks_plans = checks_plans
        self._num_gpu_blocks = num_gpu_blocks
        self._num_workers = 0
        self._workers: list[ServiceProcess] = []
        self.core_address = f"unix:{self._folder.path}/core.sock"
        self._core = _process(
            "core",
            "scheduler",
            *("--listen", self.core_address),
            *("--max-num-seqs", str(max_num_seqs)),
            *("--lease-ms", "60000"),  # an overloaded machine is measured, too
            *("--log-level", "warning"),
        )

    async def __aenter__(self) -> Self:
        self._core.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        processes = [*self._workers, self._core]
        for process in processes:
            process.kill()
        for process in processes:
            await asyncio.to_thread(process.join, _END_TIMEOUT_S)
        self._folder.remove()

    async def grow(self, num_workers: int) -> None:
        """Start workers until there are `num_workers`, and wait until all are ready. Raises
        TimeoutError if they are not."""
        while self._num_workers < num_workers:
            number = 1 if self._checks_plans else num_workers - self._num_workers
            make = self._simulated if self._checks_plans else self._answering
            worker = make(self._num_workers, number)
            worker.start()
            self._workers.append(worker)
            self._num_workers += number
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._wait_ready(num_workers)

    def core_loop_seconds(self) -> float:
        """Processor time of the core's event loop so far, without the threads of gRPC."""
        pid = self._core.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    def core_seconds(self) -> float:
        """Processor time of the core so far."""
        assert self._core.pid is not None, "the core has ended"
        return processor_seconds(self._core.pid)

    def worker_seconds(self) -> list[float]:
        """Processor time of each worker process."""
        return [processor_seconds(worker.pid) for worker in self._workers if worker.pid]

    def _answering(self, first: int, number: int) -> ServiceProcess:
        command = [
            "benchmarks.null_workers",
            *("--core", self.core_address),
            *("--folder", str(self._folder.path)),
            *("--first", str(first)),
            *("--groups", str(number)),
            *("--step-us", str(self._step_us)),
            *("--gpu-blocks", str(self._num_gpu_blocks)),
        ]
        return ServiceProcess(f"workers-{first}", command, lambda name, line: None, lambda: None)

    def _simulated(self, index: int, number: int) -> ServiceProcess:
        assert number == 1
        address = f"unix:{self._folder.path}/worker-{index}.sock"
        return _process(
            f"worker-{index}",
            "worker",
            "--simulate",
            *("--simulate-step-us", str(self._step_us)),
            *("--simulate-gpu-blocks", str(self._num_gpu_blocks)),
            *("--core", self.core_address),
            *("--listen", address),
            *("--advertise", address),
            *("--group-id", f"worker-{index:03}"),
            *("--log-level", "warning"),
        )

    async def _wait_ready(self, num_workers: int) -> None:
        async with grpc.aio.insecure_channel(self.core_address) as channel:
            watch = pb.SchedulerServiceWatchStatusRequest(interval_ms=100)
            stub = SchedulerServiceStub(channel)
            async for response in stub.WatchStatus(watch, wait_for_ready=True):
                states = [group.state for group in response.status.groups]
                if states.count(status_pb2.WORKER_STATE_READY) >= num_workers:
                    return


def _process(name: str, service: str, *arguments: str) -> ServiceProcess:
    command = [*service_commands.COMMANDS[service], *arguments]
    return ServiceProcess(name, command, lambda name, line: None, lambda: None)


FRONTEND_ID = "bare"
_INT32_BYTES = 4
_LOOK_S = 0.05


class BareFrontend:
    """A frontend without clients, text or streams; an asynchronous context manager.

    It keeps a number of greedy requests of one shape open on one `Attach` stream and counts their
    tokens, column by column, so that it uses much less processor time than the core.
    """

    def __init__(
        self, core_address: str, model: str, *, prompt_tokens: int, output_tokens: int
    ) -> None:
        self.num_tokens = 0
        """Number of output tokens received."""
        self.num_finished = 0
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._num_submitted = 0
        self._num_wanted = 0
        self._has_output = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(core_address, options=channel_options())
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._call: Any = SchedulerServiceStub(self._channel).Attach(wait_for_ready=True)
        await self._call.write(
            pb.AttachRequest(message=pb.FrontendMessage(frontend_id=FRONTEND_ID))
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._submit())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def keep_open(self, num_requests: int) -> None:
        """Keep `num_requests` requests open from now on; surplus requests run to completion."""
        self._num_wanted = num_requests
        self._has_output.set()

    async def run(self, seconds: float) -> None:
        """Sleep; raises the stream's error, if it has ended."""
        done, _ = await asyncio.wait(
            self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()

    async def run_until_finished(self, num_requests: int) -> None:
        """Wait until `num_requests` more requests have ended; raises the stream's error."""
        num_wanted = self.num_finished + num_requests
        while self.num_finished < num_wanted:
            await self.run(_LOOK_S)

    async def _submit(self) -> None:
        while True:
            await self._has_output.wait()
            self._has_output.clear()
            num_open = self._num_submitted - self.num_finished
            submits = [self._next() for _ in range(self._num_wanted - num_open)]
            if submits:
                await self._call.write(
                    pb.AttachRequest(message=pb.FrontendMessage(submits=submits))
                )

    def _next(self) -> pb.Submit:
        """A request whose prompt shares no prefix with others."""
        self._num_submitted += 1
        number = self._num_submitted
        prompt = [number % 30_000, number // 30_000] + [7] * (self._prompt_tokens - 2)
        return pb.Submit(
            handle=number,
            request_id=f"{FRONTEND_ID}-{number}",
            model=self._model,
            prompt_token_ids=array("i", prompt).tobytes(),
            num_choices=1,
            max_tokens=self._output_tokens,
            sampling=sampling_pb2.SamplerParams(temperature=0, top_p=1, repetition_penalty=1),
        )

    async def _read(self) -> None:
        while (response := await self._call.read()) is not grpc.aio.EOF:
            message = response.message
            for failed in message.requests_failed:
                raise RuntimeError(f"a request failed: {failed.reason} {failed.message}")
            self.num_tokens += len(message.token_ids) // _INT32_BYTES
            if message.requests_finished:
                self.num_finished += len(message.requests_finished)
                self._has_output.set()
        raise RuntimeError("the core ended the stream")
