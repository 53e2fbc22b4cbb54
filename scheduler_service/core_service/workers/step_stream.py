"""The core's side of `ExecuteSteps`: sends plans ahead and applies results."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service import wire
from scheduler_service.core.step_plan import FetchResult
from scheduler_service.core_service.counters import StepCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers.errors import SessionFailed, StepOverdue
from scheduler_service.core_service.workers.step_watchdog import StepTimes, StepWatch
from scheduler_service.tasks import run_until_first

logger = logging.getLogger(__name__)


Call: TypeAlias = grpc.aio.StreamStreamCall[
    worker_pb.ExecuteStepsRequest, worker_pb.ExecuteStepsResponse
]


LOOP_DELAY_SHARE = 0.1
"""Extra share of a step's least limit, in which a loop that was delayed reads waiting results."""


@dataclass(eq=False)
class StepStream:
    """One `ExecuteSteps` stream to each rank of one worker group, fenced by their epoch.

    All ranks get the same plans. One rank samples and returns results. The results of the others
    only confirm the step number, and a wrong number ends the stream of all ranks. The core plans
    ahead of the results, so that plan n+1 is at the workers before result n is back. Plans that it
    makes together are sent in one message, and their results return in one.
    """

    calls: Sequence[Call]
    driver: CoreDriver
    sampler: int
    group_id: str
    epoch: int
    times: StepTimes
    meter: StepCounters

    def __post_init__(self) -> None:
        self.num_steps = 0
        """Steps with results."""
        self._num_sent = 0
        self._num_in_flight = 0
        self._draining = False
        self._ended_fetches: list[FetchResult] = []
        """Of ranks that do not sample."""
        self._watch = StepWatch(self.times, len(self.calls))
        self._min_limit_s = self.times.min_limit_s
        self._sent = asyncio.Event()

    async def run(self, work: asyncio.Event) -> None:
        """Plan whenever `work` is set until the group is drained, then remove it from the core.

        Raises SessionFailed, grpc.aio.AioRpcError or InvalidArgument when the stream cannot
        continue; StepOverdue, a SessionFailed, when a result does not come.
        """
        followers = [self._follow(rank) for rank in range(len(self.calls)) if rank != self.sampler]
        await run_until_first(
            self._send_plans(work), self._receive_results(), self._watch_steps(), *followers
        )

    def drain(self) -> None:
        """Make `run` return once the group has nothing left; set its `work` event after this."""
        self._draining = True

    async def _send_plans(self, work: asyncio.Event) -> None:
        while not self._is_drained():
            work.clear()  # also of what a plan's own routing has set
            if (request := self._next_request()) is None:
                await work.wait()
                continue
            for call in self.calls:
                await self._write(call, request)
        # Now, because until then the core may route a request back that no other group can hold.
        self.driver.remove_worker_group(self.group_id)

    def _next_request(self) -> worker_pb.ExecuteStepsRequest | None:
        """The next plan, and those that are sent together with it."""
        plan = self._next_plan()
        if plan is None:
            return None
        request = worker_pb.ExecuteStepsRequest(plans=[plan])
        while plan.max_results and (plan := self._next_plan()) is not None:
            request.plans.append(plan)
        return request

    def _next_plan(self) -> plan_pb2.StepPlan | None:
        started_at = self.driver.clock()
        with self.driver.contained(self.group_id):
            plan = self.driver.core.schedule(self.group_id, started_at)
        self.driver.follow_up()
        if plan is None:
            return None
        self._num_in_flight += 1
        self._num_sent += 1
        work = self.driver.core.newest_work(self.group_id)
        self._watch.sent(work, started_at, plan.max_results)
        self._sent.set()
        message = wire.encode_plan(plan, self.epoch)
        self.meter.tokens.observe(work.num_tokens)
        self.meter.plan_bytes.observe(message.ByteSize())
        self._record_planning(started_at)
        return message

    def _is_drained(self) -> bool:
        return self._draining and self._num_in_flight == 0 and self.driver.is_drained(self.group_id)

    async def _write(self, call: Call, request: worker_pb.ExecuteStepsRequest) -> None:
        try:
            await call.write(request)
        except asyncio.InvalidStateError:  # the call has ended; its status has the reason
            code, details = await call.code(), await call.details()
            raise SessionFailed(f"the worker ended the stream: {code.name} {details}") from None

    async def _receive_results(self) -> None:
        call = self.calls[self.sampler]
        while (response := await call.read()) is not grpc.aio.EOF:
            if not response.results:
                raise SessionFailed("the worker sent a message without results")
            sent_us = response.results[-1].timings.finished_us
            for result in response.results:
                self._receive(result, sent_us)
            self.driver.follow_up(self.group_id)
        raise SessionFailed("the worker ended the stream")

    def _receive(self, message: plan_pb2.StepResult, sent_us: int) -> None:
        """Apply a result of a message that was sent at `sent_us` on the worker's clock."""
        if message.epoch < self.epoch:
            logger.warning(
                "stale result dropped group_id=%s epoch=%d step_id=%d",
                self.group_id,
                message.epoch,
                message.step_id,
            )
            return
        self._check(message.epoch, message.step_id)
        self._num_in_flight -= 1
        self.num_steps += 1
        started_at = self.driver.clock()
        result = wire.decode_result(message, sent_us)
        with self.driver.contained(self.group_id):
            result.fetches += self._ended_fetches
            self._ended_fetches = []
            self.driver.core.update(self.group_id, result, self.driver.clock())
        self._answered(self.sampler, started_at - result.held_us / 1e6)
        self._record_planning(started_at)

    async def _follow(self, rank: int) -> None:
        """Check the step numbers of a rank that does not sample."""
        num_results = 0
        while (response := await self.calls[rank].read()) is not grpc.aio.EOF:
            for result in response.results:
                if result.epoch < self.epoch:
                    continue
                num_results += 1
                self._check_follower(rank, num_results, result)
                self._ended_fetches += map(wire.decode_fetch_result, result.fetches)
                self._answered(rank, self.driver.clock())
        raise SessionFailed(f"rank {rank} ended the stream")

    def _check_follower(self, rank: int, step_id: int, result: plan_pb2.StepResult) -> None:
        if (result.epoch, result.step_id) != (self.epoch, step_id) or step_id > self._num_sent:
            raise SessionFailed(
                f"rank {rank}: expected the result of epoch {self.epoch} step {step_id}, "
                f"got epoch {result.epoch} step {result.step_id}"
            )
        if result.token_ids or result.candidates or result.errors:
            raise SessionFailed(f"rank {rank} samples, as rank {self.sampler} is to do")

    async def _watch_steps(self) -> None:
        """Raise StepOverdue when the oldest step in flight takes too long."""
        while True:
            self._sent.clear()
            if self._watch.overdue_at is None:
                await self._sent.wait()
            # A step that starts during the wait cannot be overdue before the wait ends.
            await asyncio.sleep(min(self._remaining_s(), self._min_limit_s))
            if self._remaining_s() > 0:
                continue
            num_done, limit_s = self._watch.num_done, self._watch.limit_s
            await asyncio.sleep(self._min_limit_s * LOOP_DELAY_SHARE)
            if self._watch.num_done == num_done:
                raise StepOverdue(num_done + 1, limit_s)

    def _remaining_s(self) -> float:
        """Seconds until the oldest step in flight is overdue."""
        overdue_at = self._watch.overdue_at
        return self._min_limit_s if overdue_at is None else overdue_at - self.driver.clock()

    def _record_planning(self, started_at: float) -> None:
        elapsed_s = self.driver.clock() - started_at
        self.driver.core.add_plan_time(self.group_id, elapsed_s)
        self.meter.planning_s += elapsed_s

    def _answered(self, rank: int, now: float) -> None:
        for seconds in self._watch.answered(rank, now):
            self.meter.duration.observe(seconds)

    def _check(self, epoch: int, step_id: int) -> None:
        expected = self.num_steps + 1
        if (epoch, step_id) != (self.epoch, expected) or self._num_in_flight == 0:
            raise SessionFailed(
                f"expected the result of epoch {self.epoch} step {expected}, "
                f"got epoch {epoch} step {step_id}"
            )
