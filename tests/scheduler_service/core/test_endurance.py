"""What has ended leaves nothing behind: memory does not grow with the requests served."""

import gc
import logging
import tracemalloc
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from scheduler_service.core import (
    Request,
    SchedulerConfig,
    SchedulerCore,
    StepPlan,
    StepResult,
)
from scheduler_service.core.inspection import MAX_ENDED
from scheduler_service.core.kv_cache.block_pool import Contents
from scheduler_service.core.kv_cache.block_table import SequenceTables
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.errors import DeadlineUnreachable, DuplicateRequest, PromptTooLong
from tests.support.core_driver import make_capacity, make_request
from tests.support.symbolic_worker import logprobs_of

MAX_OPEN = 12
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, watermark=0.0)


class Traffic:
    """A core, two workers with too little memory, and requests of all kinds, forgotten as they end.

    Workers are lost, frontends come and go, requests are cancelled, run out of time or are refused.
    The workers' tokens are any: what is right is not asked here.
    """

    def __init__(self) -> None:
        self.core = SchedulerCore(CONFIG)
        self.num_finished = 0
        self.num_refused = 0
        self.num_failed = 0
        self._draw = Random(0)
        self._now = 0.0
        self._num_submitted = 0
        self._frontend_id = "f0"
        self._results: dict[str, deque[StepResult]] = {}
        """Of each worker, those on the wire."""
        self._open: dict[int, str] = {}
        """Frontends of the requests that have not ended, by handle."""
        for group_id in ("g0", "g1"):
            self._join(group_id)

    def serve(self, num_requests: int) -> None:
        """Submit `num_requests` more requests, and run until all have ended."""
        until = self._num_submitted + num_requests
        while self._num_submitted < until or self._open:
            while self._num_submitted < until and len(self._open) < MAX_OPEN:
                self._submit()
            if self._num_submitted % 100 == 0:
                self._upset()
            self._step()
        self._step()  # the results of discarded rows

    def settle(self) -> None:
        """Make all requests that the core remembers alike: it keeps the last ones that ended, with
        what happened to them."""
        for _ in range(MAX_ENDED):
            self._num_submitted += 1
            request = self._request(prompt_token_ids=[1], max_tokens=1)
            self.core.submit(request, self._now)
            self.core.cancel(self._frontend_id, request.handle, self._now)
        self._read()

    def _join(self, group_id: str) -> None:
        self.core.add_worker_group(
            make_capacity(group_id, num_gpu_blocks=10, num_cpu_blocks=8), self._now
        )
        self._results[group_id] = deque()

    def _upset(self) -> None:
        """A worker dies and comes back; new requests come through another frontend."""
        self._num_submitted += 1
        group_id = self._draw.choice(list(self._results))
        self.core.remove_worker_group(group_id, self._now)
        self._join(group_id)
        former, self._frontend_id = self._frontend_id, f"f{self._num_submitted}"
        self._read()
        self.core.remove_frontend(former, self._now)
        self._open = {h: f for h, f in self._open.items() if f != former}

    def _request(self, **fields: object) -> Request:
        """The next one of the frontend."""
        handle = 2 * self._num_submitted
        names = {"frontend_id": self._frontend_id, "handle": handle, "request_id": f"r{handle}"}
        return make_request(sampling=None, **names, **fields)

    def _submit(self) -> None:
        self._num_submitted += 1
        draw = self._draw
        too_long = draw.random() < 1 / 32
        prompt = [draw.randrange(32) for _ in range(64 if too_long else draw.randint(1, 16))]
        request = self._request(
            prompt_token_ids=[7] * 8 + prompt if draw.random() < 1 / 4 else prompt,
            deadline=self._now + 0.003 if draw.random() < 1 / 16 else None,
            num_choices=2 if draw.random() < 1 / 4 else 1,
            max_tokens=draw.randint(1, 8),
            stop_token_ids=frozenset({draw.randrange(32)}),
        )
        try:
            self.core.submit(request, self._now)
        except (PromptTooLong, DeadlineUnreachable):
            self.num_refused += 1
            return
        with pytest.raises(DuplicateRequest):
            self.core.submit(request, self._now)
        self._open[request.handle] = self._frontend_id

    def _step(self) -> None:
        self._now += 0.001
        self.core.expire(self._now)
        for group_id, results in self._results.items():
            while (plan := self.core.schedule(group_id, self._now)) is not None:
                results.append(self._answer(plan))
        for group_id, results in self._results.items():
            if results:
                self.core.update(group_id, results.popleft(), self._now)
        self._read()
        if self._open and self._draw.random() < 1 / 64:
            handle, frontend_id = self._open.popitem()
            self.core.cancel(frontend_id, handle, self._now)

    def _answer(self, plan: StepPlan) -> StepResult:
        num_sampled = len(plan.seq_ids) if plan.output is None else sum(plan.output)
        token_ids = [self._draw.randrange(32) for _ in range(num_sampled)]
        first_samples = token_ids and num_sampled == len(plan.seq_ids)
        logprobs = {0: logprobs_of(token_ids[0])} if first_samples else {}
        return StepResult(step_id=plan.step_id, token_ids=token_ids, logprobs=logprobs)

    def _read(self) -> None:
        for outbox in self.core.pop_outboxes().values():
            for finished in outbox.requests_finished:
                self.num_finished += 1
                del self._open[finished.handle]
            for handle, _ in outbox.requests_failed:
                self.num_failed += 1
                del self._open[handle]


@pytest.fixture(autouse=True)
def unlogged(caplog: pytest.LogCaptureFixture) -> None:
    """Captured log records would be a leak of the test's own."""
    caplog.set_level(logging.CRITICAL, logger="scheduler_service")


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace all allocations."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def growth(traffic: Traffic, num_requests: int) -> tuple[int, int]:
    """Objects and bytes that `num_requests` requests leave behind, once caches are full: the least
    of two rounds, since pytest allocates meanwhile, too."""
    traffic.serve(500)
    traffic.settle()
    found = [memory()]
    for _ in range(2):
        traffic.serve(num_requests)
        traffic.settle()
        found.append(memory())
    rounds = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(found)]
    return min(abs(objects) for objects, _ in rounds), min(abs(size) for _, size in rounds)


def memory() -> tuple[int, int]:
    """Objects that the collector knows, and bytes, of everything alive in this process."""
    gc.collect()
    num_objects = len(gc.get_objects())
    return num_objects, tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("traced")
def test_a_thousand_requests_leave_nothing_behind() -> None:
    traffic = Traffic()
    num_objects, num_bytes = growth(traffic, 700)
    assert num_objects < 70, "a tenth of an object a request"
    assert num_bytes < 20_000
    assert traffic.num_finished > 600
    assert traffic.num_refused > 10
    assert traffic.num_failed > 10
    assert traffic.core.snapshot().num_preemptions > 25


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What only a garbage collection finds to be unreachable, from now on."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.enable()
    gc.garbage.clear()


def test_only_refused_requests_leave_reference_cycles(garbage: list[object]) -> None:
    """An error that is raised refers to the frames that it passed, and they to the request. They
    are garbage at once, so that no full collection exempts them from later ones."""
    traffic = Traffic()
    traffic.serve(700)
    gc.collect()
    num_groups = sum(isinstance(thing, SequenceGroup) for thing in garbage)
    assert 0 < num_groups <= traffic.num_refused < 50 < traffic.num_finished
    assert not any(isinstance(thing, Contents | SequenceTables) for thing in garbage)


@pytest.mark.long
def test_a_hundred_thousand_requests_leave_nothing_behind() -> None:
    traffic = Traffic()
    num_objects, _ = growth(traffic, 50_000)
    assert num_objects < 50
    assert traffic.num_finished > 60_000
