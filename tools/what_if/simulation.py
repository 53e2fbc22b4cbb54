"""Replays a trace on a core with any configuration, in virtual time.

The core is the real one. Its workers only simulate the duration of steps, by a cost model, and give
each choice its recorded tokens, by position, but for the last one, by which it ends. Vectors are
zeros. KV that one worker group reads from another arrives with the step that asks for it.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service.core import (
    Request,
    SchedulerCore,
    StepPlan,
    StepResult,
    WorkerGroupCapacity,
)
from scheduler_service.core.request import Pooling
from scheduler_service.core.scheduling.pooling import row_bytes
from scheduler_service.core.step_plan import FetchResult, RowOutput
from scheduler_service.errors import PagewireError
from scheduler_service.replay.recording import Entry
from tools.what_if.cost_model import CostModel, StepSize
from tools.what_if.trace import Histories, RequestHistory, Trace, num_resumed


@dataclass(slots=True)
class _Sequence:
    history: RequestHistory
    choice_index: int
    num_output: int
    """Tokens sampled by this core so far."""

    def next_token(self) -> int:
        """The recorded token, or the one that ends the choice."""
        tokens = self.history.choices[self.choice_index].tokens
        position = self.num_output
        self.num_output += 1
        return tokens[position] if position < len(tokens) - 1 else _end_token(self.history)


def _end_token(history: RequestHistory) -> int:
    """A token that no choice of the request has."""
    tokens = {token for choice in history.choices for token in choice.tokens}
    return next(token for token in itertools.count() if token not in tokens)


class VirtualWorker:
    """Executes plans one after the other, in the time that a cost model predicts."""

    def __init__(
        self,
        capacity: WorkerGroupCapacity,
        costs: CostModel,
        arrivals: Mapping[int, RequestHistory],
    ) -> None:
        """`arrivals`: by number, which is the seed of a sequence's sampling parameters."""
        self._capacity = capacity
        self._costs = costs
        self._arrivals = arrivals
        self._sequences: dict[int, _Sequence] = {}
        self._pooled: dict[int, Pooling] = {}
        """What sequences that are pooled want."""
        self._free_at = 0.0

    def execute(self, plan: StepPlan, now: float) -> tuple[float, StepResult]:
        """The result of a plan that is sent now, and when it arrives."""
        seconds = self._costs.seconds(StepSize.of(plan))
        self._free_at = max(now, self._free_at) + seconds
        busy_us = round(seconds * 1e6)
        self._learn(plan)
        return self._free_at, StepResult(
            step_id=plan.step_id,
            token_ids=self._sample(plan),
            vectors=self._vectors(plan),
            fetches=[
                FetchResult(fetch_id=fetch.fetch_id, duration_us=busy_us)
                for fetch in plan.fetches
                for _ in fetch.addresses
            ],
            forward_us=busy_us,
            busy_us=busy_us,
        )

    def _learn(self, plan: StepPlan) -> None:
        for seq_id in plan.forget_seq_ids:
            self._sequences.pop(seq_id, None)
            self._pooled.pop(seq_id, None)
        for new in plan.new_sequences:
            if new.pooling is not None:
                self._pooled[new.seq_id] = new.pooling
                continue
            history = self._arrivals[new.sampling.seed]
            if new.parent_seq_id is not None:
                num_output = self._sequences[new.parent_seq_id].num_output
            else:
                num_known = len(new.token_ids) - new.num_prompt_tokens
                num_output = num_known - num_resumed(history.request, new.choice_index)
            self._sequences[new.seq_id] = _Sequence(history, new.choice_index, num_output)

    def _sample(self, plan: StepPlan) -> list[int]:
        outputs = plan.output or itertools.repeat(RowOutput.TOKEN)
        return [
            self._sequences[seq_id].next_token()
            for seq_id, output in zip(plan.seq_ids, outputs, strict=False)
            if output == RowOutput.TOKEN
        ]

    def _vectors(self, plan: StepPlan) -> dict[int, bytes]:
        counts = plan.num_tokens or [1] * len(plan.seq_ids)
        return {
            row: bytes(row_bytes(self._pooled[plan.seq_ids[row]], counts[row], self._capacity))
            for row, output in enumerate(plan.output or ())
            if output == RowOutput.VECTOR
        }


def _simulated(history: RequestHistory) -> Request:
    """The request as it is simulated. Of a beam search only the resulting choices are known, not
    the other beams."""
    sampling = SamplerParams(seed=history.number)
    work = history.request.work
    if isinstance(work, Pooling):
        return replace(history.request, work=replace(work, pooling=work))
    ends = frozenset({_end_token(history)})
    work = replace(work, sampling=sampling, beam_search=None, stop_token_ids=ends)
    return replace(history.request, work=work)


def simulate(
    trace: Trace, core: SchedulerCore, costs: Mapping[str, CostModel]
) -> list[RequestHistory]:
    """Run a trace on a new core until nothing is left to do; `costs` by worker group. Returns the
    histories of accepted requests.

    Raises ValueError if a worker group cannot work with the core's configuration.
    """
    return _Simulation(trace, core, costs).run()


class _Simulation:
    def __init__(self, trace: Trace, core: SchedulerCore, costs: Mapping[str, CostModel]) -> None:
        self._core = core
        self._costs = costs
        self._arrivals = {history.number: history for history in trace.histories}
        self._workers: dict[str, VirtualWorker] = {}
        self._histories = Histories()
        self._now = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        for entry in trace.interventions:
            assert entry.now is not None
            self._at(entry.now, partial(self._intervene, entry))
        for history in trace.histories:
            self._at(history.submitted, partial(self._submit, history))

    def run(self) -> list[RequestHistory]:
        while self._step():
            self._plan()
            self._histories.read(self._core.pop_outboxes(), self._now)
        return self._histories.all

    def _at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), do))

    def _step(self) -> bool:
        """Process all events of the next instant; False if there are none."""
        deadline = self._core.next_deadline()
        if deadline is not None and (not self._agenda or deadline <= self._agenda[0][0]):
            self._now = max(self._now, deadline)
            self._core.expire(self._now)
        elif self._agenda:
            self._now = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] == self._now:
                heapq.heappop(self._agenda)[-1]()
        else:
            return False
        return True

    # Events.

    def _intervene(self, entry: Entry) -> None:
        if entry.do == "add_worker_group":
            capacity = entry.arguments["capacity"]
            group_id = capacity.worker_group_id
            costs = self._costs.get(group_id) or next(iter(self._costs.values()))
            self._workers[group_id] = VirtualWorker(capacity, costs, self._arrivals)
        elif entry.do in ("remove_worker_group", "fail_worker_group"):
            self._workers.pop(entry.arguments["worker_group_id"], None)
        self._histories.disconnect(entry, self._now)
        with suppress(PagewireError):  # may abort a request that has already ended
            getattr(self._core, entry.do)(**entry.arguments)

    def _submit(self, arrival: RequestHistory) -> None:
        with suppress(PagewireError):
            self._core.submit(_simulated(arrival), self._now)
            self._histories.add(RequestHistory.begin(arrival.number, arrival.request, self._now))

    # Planning.

    def _plan(self) -> None:
        """Plan all steps that can be planned now, also of groups that are woken meanwhile."""
        due = list(self._workers)
        while due:
            for group_id in due:
                self._plan_for(group_id, self._workers[group_id])
            woken = self._core.pop_woken()
            due = [group_id for group_id in self._workers if group_id in woken]

    def _plan_for(self, group_id: str, worker: VirtualWorker) -> None:
        while (plan := self._core.schedule(group_id, self._now)) is not None:
            time, result = worker.execute(plan, self._now)
            self._at(time, partial(self._update, group_id, worker, result))

    def _update(self, group_id: str, worker: VirtualWorker, result: StepResult) -> None:
        if self._workers.get(group_id) is worker:  # else it was lost with its results
            self._core.update(group_id, result, self._now)
