"""Effect of one tenant's flood on another, and shares by weight, in simulated time.

One worker group with step times from a cost model, and the real scheduler core. Two figures per
policy:

- The calm tenant's 99th percentile of the time to the first token while another tenant sends ten
  times as much, more than can be served, as a multiple of its value alone. The calm tenant sends
  one request after another and needs less than its share; bursts would take longer under any fair
  policy.
- The shares of the service (prompt tokens, and output tokens twice) of three tenants with weights
  1 : 2 : 4 that all send more than can be served.

The same numbers come out every time.

    python -m benchmarks.fairness
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from scheduler_service.core import (
    PolicyName,
    Request,
    SchedulerConfig,
    SchedulerCore,
    StepPlan,
    StepResult,
    TenantConfig,
    WorkerGroupCapacity,
)
from scheduler_service.core.policies.fair import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

GROUP = WorkerGroupCapacity(
    worker_group_id="g",
    model="m",
    num_gpu_blocks=8192,
    num_cpu_blocks=0,
    block_size=16,
    max_model_len=4096,
    vocab_size=32_000,
)
CONFIG = SchedulerConfig(
    max_num_seqs=32,
    max_num_batched_tokens=256,
    max_queue_requests=1_000_000,
    max_queue_tokens=2**40,
    enable_prefix_caching=False,
)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}
CALM_RATE = 1.0
FLOOD_RATE = 10 * CALM_RATE
TOKEN = 11


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The duration of a step in seconds, similar to that of an 8B model on one large GPU."""

    step: float = 0.008
    prefill_token: float = 0.00006
    row: float = 0.00003

    def duration(self, plan: StepPlan) -> float:
        """Duration of a plan on the worker."""
        num_rows = len(plan.seq_ids)
        num_tokens = num_rows if plan.num_tokens is None else sum(plan.num_tokens)
        return self.step + self.row * num_rows + self.prefill_token * (num_tokens - num_rows)


@dataclass(frozen=True, kw_only=True, order=True)
class Arrival:
    """A request and its arrival time."""

    time: float
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass
class Served:
    """Outcome of one request."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    """Times of its output tokens."""


class Simulation:
    """A core, and one worker that executes its plans one after another."""

    def __init__(
        self, config: SchedulerConfig, cost: CostModel, group: WorkerGroupCapacity = GROUP
    ) -> None:
        self.now = 0.0
        self.served: dict[int, Served] = {}
        self._core = SchedulerCore(config)
        self._core.add_worker_group(group, self.now)
        self._cost = cost
        self._worker_free_at = 0.0
        self._results: deque[tuple[float, StepResult]] = deque()

    def run(self, arrivals: Sequence[Arrival], until: float) -> None:
        """Simulate arrivals and steps up to a time."""
        coming = deque(sorted(arrivals))
        while True:
            times = [coming[0].time] if coming else []
            times += [self._results[0][0]] if self._results else []
            if not times or min(times) > until:
                return
            self.now = min(times)
            while coming and coming[0].time <= self.now:
                self._submit(coming.popleft())
            while self._results and self._results[0][0] <= self.now:
                self._core.update("g", self._results.popleft()[1], self.now)
            self._read()
            while (plan := self._core.schedule("g", self.now)) is not None:
                self._execute(plan)

    def service(self) -> Counter[str]:
        """The service of each tenant: prompts that have a first token, and output tokens."""
        service: Counter[str] = Counter()
        for served in self.served.values():
            if served.times:
                prompt = PROMPT_TOKEN_COST * served.arrival.num_prompt_tokens
                service[served.arrival.tenant] += prompt + OUTPUT_TOKEN_COST * len(served.times)
        return service

    def _submit(self, arrival: Arrival) -> None:
        handle = len(self.served) + 1
        self.served[handle] = Served(arrival)
        request = Request(
            frontend_id="f",
            handle=handle,
            request_id=f"r{handle}",
            model="m",
            tenant=arrival.tenant,
            prompt_token_ids=[TOKEN] * arrival.num_prompt_tokens,
            max_tokens=arrival.num_output_tokens,
            sampling=None,
        )
        self._core.submit(request, self.now)

    def _execute(self, plan: StepPlan) -> None:
        duration = self._cost.duration(plan)
        self._worker_free_at = max(self._worker_free_at, self.now) + duration
        num_tokens = len(plan.seq_ids) if plan.sample is None else sum(plan.sample)
        result = StepResult(
            step_id=plan.step_id, token_ids=[TOKEN] * num_tokens, busy_us=round(duration * 1e6)
        )
        self._results.append((self._worker_free_at, result))

    def _read(self) -> None:
        for outbox in self._core.take_outboxes().values():
            for handle in outbox.token_handles:
                self.served[handle].times.append(self.now)


def steady(tenant: str, rate: float, until: float) -> Iterator[Arrival]:
    """Requests one after another: `rate` a second, at intervals between a half and one and a half
    times the mean."""
    rng = Random(tenant)
    return _requests(tenant, rng, lambda: rng.uniform(0.5, 1.5) / rate, until)


def bursty(tenant: str, rate: float, until: float) -> Iterator[Arrival]:
    """Requests at random times, `rate` a second."""
    rng = Random(tenant)
    return _requests(tenant, rng, lambda: rng.expovariate(rate), until)


def _requests(
    tenant: str, rng: Random, interval: Callable[[], float], until: float
) -> Iterator[Arrival]:
    """Requests with prompts and answers of random lengths."""
    time = interval()
    while time < until:
        yield Arrival(
            time=time,
            tenant=tenant,
            num_prompt_tokens=rng.randint(500, 1500),
            num_output_tokens=rng.randint(50, 250),
        )
        time += interval()


def first_token_p99(policy: PolicyName, *, flooded: bool, until: float = 300.0) -> float:
    """The calm tenant's 99th percentile of the time to the first token, in seconds."""
    simulation = Simulation(replace(CONFIG, policy=policy), CostModel())
    arrivals = list(steady("calm", CALM_RATE, until))
    if flooded:
        arrivals += bursty("flood", FLOOD_RATE, until)
    simulation.run(arrivals, until=4 * until)
    calm = [s for s in simulation.served.values() if s.arrival.tenant == "calm"]
    waits = [(s.times[0] if s.times else simulation.now) - s.arrival.time for s in calm]
    return float(np.percentile(waits, 99, method="inverted_cdf"))


def slowdown(policy: PolicyName, until: float = 300.0) -> float:
    """The calm tenant's time to the first token (p99) during the flood, relative to that alone."""
    alone = first_token_p99(policy, flooded=False, until=until)
    return first_token_p99(policy, flooded=True, until=until) / alone


def shares(policy: PolicyName, until: float = 120.0) -> dict[str, float]:
    """The part of the service that each tenant gets when all send more than can be served."""
    tenants = {name: TenantConfig(weight=weight) for name, weight in WEIGHTS.items()}
    simulation = Simulation(replace(CONFIG, policy=policy, tenants=tenants), CostModel())
    arrivals = [arrival for name in WEIGHTS for arrival in bursty(name, 20.0, until)]
    simulation.run(arrivals, until=until)
    service = simulation.service()
    return {name: service[name] / service.total() for name in WEIGHTS}


def due_shares() -> Mapping[str, float]:
    """Shares according to the weights."""
    return {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}


def main() -> None:
    """Print both figures for each policy."""
    logging.basicConfig(level=logging.ERROR)  # preemptions are expected here
    due = due_shares()
    for policy in (PolicyName.FCFS, PolicyName.FAIR):
        alone = first_token_p99(policy, flooded=False)
        flooded = first_token_p99(policy, flooded=True)
        print(f"{policy}: p99 of the calm tenant's time to the first token")
        print(
            f"  alone {alone * 1e3:.0f} ms, with ten times as much {flooded * 1e3:.0f} ms: "
            f"{flooded / alone:.2f} times as long"
        )
        print(f"{policy}: shares of the service under saturation, weights 1 : 2 : 4")
        for name, share in shares(policy).items():
            print(f"  {name} {share:.3f}, due {due[name]:.3f}: {share / due[name] - 1:+.1%}")


if __name__ == "__main__":
    main()
