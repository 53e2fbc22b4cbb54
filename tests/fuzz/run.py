"""One run: a deployment of processes, mutated requests, and a check for leaks."""

import asyncio
from typing import Any

from pagewire_cli.local import LocalServices
from pagewire_client import Client, SamplingParams
from pagewire_client.errors import PagewireError
from tests.fuzz import grpc_calls, http_calls
from tests.fuzz.hostile_core import HostileCore
from tests.fuzz.logs import Logs
from tests.fuzz.outcome import Outcome
from tests.fuzz.remains import Growth, blame_what_is_open
from tests.support.simulated_services import simulated_services

TARGETS = ("grpc", "http", "core", "worker")
MAX_MODEL_LEN = 256
"""Keeps what a request may ask for short."""
WARM_UP = 0.2
"""Share of the requests after which memory is looked at first."""
LAST_REQUEST_S = 60.0
"""Time limit of a request after the run; a core may have to take back a worker first."""


def run(target: str, *, num_calls: int, seed: int) -> tuple[Outcome, Growth]:
    """Call `num_calls` times; the outcome's `harm` says all that went wrong."""
    outcome, logs = Outcome(), Logs()
    with simulated_services(http=True, max_model_len=MAX_MODEL_LEN, on_line=logs.add) as services:
        warm_up = round(num_calls * WARM_UP)
        asyncio.run(_calls(target, services, warm_up, 2 * seed, outcome))
        growth = Growth.since_now(services.processes)
        asyncio.run(_calls(target, services, num_calls - warm_up, 2 * seed + 1, outcome))
        _blame_dead(services, outcome)
        growth.settle(outcome)
    for error in logs.errors():
        outcome.blame(f"logged by {error}")
    for process in services.processes:
        if process.exit_code != 0:
            outcome.blame(f"{process.name}, asked to stop, ended with code {process.exit_code}")
    return outcome, growth


async def _calls(
    target: str, services: LocalServices, num_calls: int, seed: int, outcome: Outcome
) -> None:
    common: dict[str, Any] = {"num_calls": num_calls, "seed": seed, "outcome": outcome}
    if target == "http":
        assert services.http_address is not None
        await http_calls.call_many(services.http_address, **common)
        return
    worker_address = services.core_address.replace("core.sock", "worker-0.sock")
    address, service, seeds, caller = {
        "grpc": (
            services.addresses[0],
            "InferenceService",
            grpc_calls.SEEDS,
            grpc_calls.GrpcCaller,
        ),
        "core": (
            services.core_address,
            "SchedulerService",
            grpc_calls.CORE_SEEDS,
            grpc_calls.GrpcCaller,
        ),
        "worker": (worker_address, "WorkerService", grpc_calls.WORKER_SEEDS, HostileCore),
    }[target]
    await grpc_calls.call_many(address, f"pagewire.v1.{service}", seeds, caller=caller, **common)


def _blame_dead(services: LocalServices, outcome: Outcome) -> None:
    """Check that no process was restarted, requests are served, and nothing is left open."""
    for process in services.processes:
        if process.num_starts != 1:
            outcome.blame(f"{process.name} was started {process.num_starts} times")
    with Client(services.addresses[0]) as client:
        try:
            client.generate([5, 6], SamplingParams(max_tokens=3), timeout=LAST_REQUEST_S)
        except PagewireError as error:
            outcome.blame(f"a request after the run failed: {error!r}")
        blame_what_is_open(client, outcome)
