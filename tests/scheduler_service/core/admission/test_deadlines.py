"""Deadlines as inputs to scheduling; scenarios/deadlines.txt shows what becomes of requests."""

from dataclasses import replace
from random import Random

import pytest

from scheduler_service.core import PolicyName, Request, SchedulerConfig, SchedulerCore
from scheduler_service.core.admission.deadlines import _min_wait_us, _work_us
from tests.support.virtual import GPU_CONFIG, script, serve


class EstimatingCore(SchedulerCore):
    """Records, for each request that comes, the least time to its first token."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.estimates: dict[int, tuple[float, float]] = {}
        """Of the queue and of its own work, in seconds, by handle."""

    def submit(self, request: Request, now: float) -> None:
        super().submit(request, now)
        group = self.requests.find(request.tenant, request.request_id)
        assert group is not None
        model = self._fleet.models["m"]
        estimate = _min_wait_us(group, model) / 1e6, _work_us(group, model) / 1e6
        self.estimates[request.handle] = estimate


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("rate", [3.0, 12.0, 30.0])
def test_the_estimate_is_never_more_than_the_time_it_takes(policy: PolicyName, rate: float) -> None:
    """Under light and heavy load, with tenants and answers of all lengths."""
    rng = Random(f"{policy}/{rate}")
    core = EstimatingCore(replace(GPU_CONFIG, policy=policy, max_num_seqs=16))
    scripts = [
        script(
            number,
            at=rng.uniform(0, 300 / rate),
            tenant=rng.choice("aab"),
            prompt=rng.randint(10, 1500),
            num_tokens=rng.choice([1, 10, 200]),
        )
        for number in range(300)
    ]
    num_waits = 0
    for history in serve(core, scripts):
        wait, own = core.estimates[history.request.handle]
        assert history.first_token is not None
        assert wait + own <= history.first_token - history.submitted + 1e-6
        num_waits += wait > 0
    assert num_waits > 100 or rate < 30
