"""Replays a trace on a core with any configuration, in virtual time.

The core is the real one. Its workers only simulate the duration of steps, by a cost model, and give
each choice its recorded tokens, by position. Frontends are as fast as recorded.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service.core import SchedulerCore, StepPlan, StepResult
from scheduler_service.core.request import Generation, Pooling
from scheduler_service.core.scheduler_stats import CoreSnapshot
from scheduler_service.errors import PagewireError
from scheduler_service.replay.recording import Entry
from tools.what_if.cost_model import CostModel, StepSize
from tools.what_if.trace import Histories, RequestHistory, Script, Stop, Trace, num_resumed


@dataclass(slots=True)
class _Sequence:
    script: Script
    choice_index: int
    num_output: int
    """Tokens sampled by this core so far."""

    def next_token(self) -> int:
        """The recorded token, or one that ends nothing after the last recorded one."""
        tokens = self.script.tokens[self.choice_index]
        position = self.num_output
        self.num_output += 1
        return tokens[position] if position < len(tokens) else _filler(self.script)


def _filler(script: Script) -> int:
    stops = script.request.work.stop_token_ids
    return next(token for token in itertools.count() if token not in stops)


class VirtualWorker:
    """Executes plans one after the other, in the time that a cost model predicts."""

    def __init__(self, costs: CostModel, scripts: Mapping[int, Script]) -> None:
        """scripts: by number, which is the seed of a sequence's sampling parameters."""
        self._costs = costs
        self._scripts = scripts
        self._sequences: dict[int, _Sequence] = {}
        self._free_at = 0.0

    def execute(self, plan: StepPlan, now: float) -> tuple[float, StepResult]:
        """The result of a plan that is sent now, and when it arrives."""
        seconds = self._costs.seconds(StepSize.of(plan))
        self._free_at = max(now, self._free_at) + seconds
        busy_us = round(seconds * 1e6)
        return self._free_at, StepResult(
            step_id=plan.step_id,
            token_ids=self._sample(plan),
            forward_us=busy_us,
            busy_us=busy_us,
        )

    def _sample(self, plan: StepPlan) -> list[int]:
        for seq_id in plan.forget_seq_ids:
            del self._sequences[seq_id]
        for new in plan.new_sequences:
            script = self._scripts[new.sampling.seed]
            if new.parent_seq_id is not None:
                num_output = self._sequences[new.parent_seq_id].num_output
            else:
                num_known = len(new.token_ids) - new.num_prompt_tokens
                num_output = num_known - num_resumed(script.request, new.choice_index)
            self._sequences[new.seq_id] = _Sequence(script, new.choice_index, num_output)
        samples = plan.output or itertools.repeat(True)
        return [
            self._sequences[seq_id].next_token()
            for seq_id, does_sample in zip(plan.seq_ids, samples, strict=False)
            if does_sample
        ]


def _without_search(work: Generation | Pooling, sampling: SamplerParams) -> Generation:
    """The work of a request as it is simulated. Of a beam search only the resulting choices are
    known, not the other beams. A vector takes as long as a first token."""
    if isinstance(work, Pooling):
        return Generation(max_tokens=work.max_tokens, sampling=sampling)
    return replace(work, sampling=sampling, beam_search=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The outcome of a simulation."""

    histories: list[RequestHistory]
    """Histories of accepted requests."""
    state: CoreSnapshot
    """At the end."""


def simulate(trace: Trace, core: SchedulerCore, costs: Mapping[str, CostModel]) -> Simulated:
    """Run a trace on a new core until nothing is left to do; `costs` by worker group.

    Raises ValueError if a worker group cannot work with the core's configuration.
    """
    return _Simulation(trace, core, costs).run()


class _Simulation:
    def __init__(self, trace: Trace, core: SchedulerCore, costs: Mapping[str, CostModel]) -> None:
        self._core = core
        self._costs = costs
        self._any_costs = next(iter(costs.values()))
        self._scripts = {script.number: script for script in trace.scripts}
        self._workers: dict[str, VirtualWorker] = {}
        self._histories = Histories()
        self._stops: dict[int, list[Stop | None]] = {}
        self._now = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        for entry in trace.interventions:
            assert entry.now is not None
            self._at(entry.now, partial(self._intervene, entry))
        for script in trace.scripts:
            self._at(script.submitted, partial(self._submit, script))

    def run(self) -> Simulated:
        while self._step():
            self._plan()
            self._read_outputs()
        return Simulated(histories=self._histories.all, state=self._core.snapshot())

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
        arguments = entry.arguments
        match entry.do:
            case "add_worker_group":
                group_id = arguments["capacity"].worker_group_id
                costs = self._costs.get(group_id, self._any_costs)
                self._workers[group_id] = VirtualWorker(costs, self._scripts)
            case "remove_worker_group":
                self._workers.pop(arguments["worker_group_id"], None)
            case "cancel":
                self._histories.cancel(**arguments)
            case "remove_frontend":
                self._histories.remove_frontend(**arguments)
        with suppress(PagewireError):  # may abort a request that has already ended
            getattr(self._core, entry.do)(**arguments)

    def _submit(self, script: Script) -> None:
        try:
            work = _without_search(script.request.work, SamplerParams(seed=script.number))
            self._core.submit(replace(script.request, work=work), self._now)
        except PagewireError:
            return
        history = self._histories.begin(script.number, script.request, self._now)
        self._stops[history.number] = script.stops
        for index, stop in enumerate(script.stops):
            if stop is not None and stop.num_tokens == 0:
                self._stop_later(history, index, stop)

    def _stop_later(self, history: RequestHistory, index: int, stop: Stop) -> None:
        request = history.request
        num_tokens = stop.num_tokens + num_resumed(request, index)

        def stop_now() -> None:
            if self._histories.find(request.frontend_id, request.handle + index) is not None:
                handle = request.handle + index
                self._core.stop_choice(request.frontend_id, handle, num_tokens, self._now)
                choice = history.choices[index]
                del choice.tokens[stop.num_tokens :], choice.times[stop.num_tokens :]

        self._at(self._now + stop.delay_s, stop_now)

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

    def _read_outputs(self) -> None:
        for history, index in self._histories.read(self._core.pop_outboxes(), self._now):
            stop = self._stops[history.number][index]
            if stop is not None and len(history.choices[index].tokens) == stop.num_tokens:
                self._stop_later(history, index, stop)
