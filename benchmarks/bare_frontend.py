"""A load on the scheduler core alone: a frontend without clients, text or streams.

It keeps a number of requests open on one `Attach` stream and counts what comes back, column by
column, so that it takes much less processor time than the core does.
"""

import asyncio
from array import array
from typing import Any, Self

import grpc

from pagewire.v1 import sampling_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from service_common.grpc_options import channel_options

FRONTEND_ID = "bare"
_INT32_BYTES = 4
_LOOK_S = 0.05


class BareFrontend:
    """One stream with greedy requests of one shape; an asynchronous context manager."""

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
        self._has_news = asyncio.Event()
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
        """Keep `num_requests` requests open from now on; surplus ones run to their ends."""
        self._num_wanted = num_requests
        self._has_news.set()

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
            await self._has_news.wait()
            self._has_news.clear()
            num_open = self._num_submitted - self.num_finished
            submits = [self._next() for _ in range(self._num_wanted - num_open)]
            if submits:
                await self._call.write(
                    pb.AttachRequest(message=pb.FrontendMessage(submits=submits))
                )

    def _next(self) -> pb.Submit:
        """A request whose prompt shares nothing with others'."""
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
                self._has_news.set()
        raise RuntimeError("the core ended the stream")
