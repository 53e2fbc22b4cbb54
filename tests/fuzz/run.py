"""One run: a deployment of processes, mutated requests at it, and a look at what is left of it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from pagewire.v1.status_pb2 import EngineStatus
from pagewire_client import Client, SamplingParams
from pagewire_client.local import LocalServices
from tests.fuzz import grpc_calls, http_calls
from tests.fuzz.outcome import Outcome
from tests.support.simulated_services import resident_bytes, simulated_services

TARGETS = ("grpc", "http", "core", "worker")
MAX_MODEL_LEN = 256
"""Keeps what a request may ask for short."""
WARM_UP = 0.2
"""Share of the requests after which memory is looked at first."""
SETTLE_S = 30.0


@dataclass
class Growth:
    """Resident bytes of each process, after the warm-up and in the end."""

    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {self.before[name] >> 20} -> {self.after[name] >> 20} MiB"
            for name in self.before
        )


def run(target: str, *, num_calls: int, seed: int) -> tuple[Outcome, Growth]:
    """Call `num_calls` times; the outcome's `harm` says all that went wrong."""
    outcome, growth, lines = Outcome(), Growth(), list[str]()
    with simulated_services(
        http=True, max_model_len=MAX_MODEL_LEN, on_line=lambda _, line: lines.append(line)
    ) as services:
        for number, share in enumerate((WARM_UP, 1 - WARM_UP)):
            calls = _calls(target, services, round(num_calls * share), 2 * seed + number, outcome)
            asyncio.run(calls)
            memory = {process.name: _memory(process) for process in services.processes}
            growth.before, growth.after = growth.before or memory, memory
        _check_alive(services, outcome)
    for line in lines:
        if "Traceback" in line or " ERROR " in line or " CRITICAL " in line:
            outcome.blame(f"logged: {line}")
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
    address, service, seeds = {
        "grpc": (services.addresses[0], "InferenceService", grpc_calls.SEEDS),
        "core": (services.core_address, "SchedulerService", grpc_calls.CORE_SEEDS),
        "worker": (worker_address, "WorkerService", grpc_calls.WORKER_SEEDS),
    }[target]
    await grpc_calls.call_many(address, f"pagewire.v1.{service}", seeds, **common)


def _check_alive(services: LocalServices, outcome: Outcome) -> None:
    """All processes are the first ones, nothing is left open, and requests are served."""
    for process in services.processes:
        if process.num_starts != 1:
            outcome.blame(f"{process.name} was started {process.num_starts} times")
    with Client(services.addresses[0]) as client:
        if not client.generate([5, 6], SamplingParams(max_tokens=3)).finished:
            outcome.blame("a request after the run has no end")
        deadline = time.monotonic() + SETTLE_S
        while _num_open(status := client.get_status()) and time.monotonic() < deadline:
            time.sleep(0.1)  # calls that were cut off end within a step
        if _num_open(status):
            outcome.blame(f"{_num_open(status)} requests are open after the run")


def _num_open(status: EngineStatus) -> int:
    return status.num_running + status.num_waiting + status.num_swapped


def _memory(process: Any) -> int:
    return 0 if process.pid is None else resident_bytes(process.pid)
