"""The hot path's core side: plans go out, results come in, a few steps at a time."""

import asyncio
import logging
from typing import TypeAlias

import grpc

from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service import wire
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.tasks import run_until_first

logger = logging.getLogger(__name__)


Call: TypeAlias = grpc.aio.StreamStreamCall[
    worker_pb.ExecuteStepsRequest, worker_pb.ExecuteStepsResponse
]


class LinkFailed(Exception):
    """The line to a worker broke, or the worker does not keep to the contract."""


class StepStream:
    """One `ExecuteSteps` stream of one worker group, fenced by its epoch.

    The core gives up to `pipeline_depth` plans ahead of the results, so that plan n+1 is at the
    worker before result n is back.
    """

    def __init__(
        self,
        call: Call,
        driver: CoreDriver,
        *,
        group_id: str,
        epoch: int,
    ) -> None:
        self.num_steps = 0
        """Steps whose results are back."""
        self._call = call
        self._driver = driver
        self._group_id = group_id
        self._epoch = epoch
        self._num_in_flight = 0
        self._draining = False

    async def run(self, work: asyncio.Event) -> None:
        """Plan whenever `work` is set, until the group is drained.

        Raises LinkFailed, grpc.aio.AioRpcError or InvalidArgument when the stream cannot go on.
        """
        await run_until_first(self._send_plans(work), self._receive_results())

    def drain(self) -> None:
        """Let `run` return once nothing is left to do; set its `work` event after this."""
        self._draining = True

    async def _send_plans(self, work: asyncio.Event) -> None:
        while not self._is_drained():
            work.clear()
            while (request := self._next_request()) is not None:
                self._num_in_flight += 1
                await self._write(request)
            await work.wait()

    def _next_request(self) -> worker_pb.ExecuteStepsRequest | None:
        started_at = self._driver.clock()
        plan = self._driver.next_plan(self._group_id)
        if plan is None:
            return None
        request = worker_pb.ExecuteStepsRequest(plan=wire.encode_plan(plan, self._epoch))
        self._driver.core.add_plan_time(self._group_id, self._driver.clock() - started_at)
        return request

    def _is_drained(self) -> bool:
        return (
            self._draining and self._num_in_flight == 0 and self._driver.is_drained(self._group_id)
        )

    async def _write(self, request: worker_pb.ExecuteStepsRequest) -> None:
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:  # the call has ended; its status tells why
            code, details = await self._call.code(), await self._call.details()
            raise LinkFailed(f"the worker ended the stream: {code.name} {details}") from None

    async def _receive_results(self) -> None:
        while (response := await self._call.read()) is not grpc.aio.EOF:
            result = response.result
            if result.epoch < self._epoch:
                logger.warning(
                    "stale result dropped group_id=%s epoch=%d step_id=%d",
                    self._group_id,
                    result.epoch,
                    result.step_id,
                )
                continue
            self._check(result.epoch, result.step_id)
            self._num_in_flight -= 1
            self.num_steps += 1
            self._apply(result)
        raise LinkFailed("the worker ended the stream")

    def _apply(self, result: plan_pb2.StepResult) -> None:
        started_at = self._driver.clock()
        self._driver.apply(self._group_id, wire.decode_result(result))
        self._driver.core.add_plan_time(self._group_id, self._driver.clock() - started_at)

    def _check(self, epoch: int, step_id: int) -> None:
        expected = self.num_steps + 1
        if (epoch, step_id) != (self._epoch, expected) or self._num_in_flight == 0:
            raise LinkFailed(
                f"expected the result of epoch {self._epoch} step {expected}, "
                f"got epoch {epoch} step {step_id}"
            )
