"""A request's account of its time, held to what its client has measured."""

import threading
import time
from collections.abc import Callable
from typing import Any

from pagewire_client import Client, RequestOutput, SamplingParams, Timings

STEP_S = 0.005
STEP_US = str(STEP_S * 1e6)
TOLERANCE = 0.01
CALL_S = 0.02
"""For a call's way there and back, and for what its client does: no part of the account."""
MAX_TRIES = 8
PROMPT = list(range(3, 67))


def parts_of(timings: Timings) -> dict[str, int]:
    """The parts of the total, by name."""
    names = (field.name for field in timings.DESCRIPTOR.fields)
    return {
        name: getattr(timings, name)
        for name in names
        if name.endswith("_us") and name != "total_us"
    }


def total_of_parts(timings: Timings) -> int:
    return sum(parts_of(timings).values())


Result = tuple[RequestOutput, float]
"""An answer, and the seconds that its client waited for it."""


def account(output: RequestOutput, wall_s: float) -> Timings:
    """An answer's timings, whose parts add up to a total that the client has waited at least."""
    timings = output.timings
    assert timings is not None
    assert total_of_parts(timings) == timings.total_us
    assert timings.total_us <= wall_s * 1e6
    return timings


def computing_us(timings: Timings) -> int:
    """A simulated step takes its time for both together."""
    return timings.forward_us + timings.sample_us


def steps_us(num_tokens: int) -> float:
    """The least time for that many tokens. The first one's step, a prompt's, takes less; and where
    a step's result was late, part of the next one's time is attributed to the wire."""
    return 0.8 * (num_tokens - 1) * STEP_S * 1e6


def accounts(call: Callable[[], list[Result]]) -> list[Timings]:
    """Those of all answers to a call, of which one's total is what its client has waited.

    Others may not be: this process is a client that is kept from its work now and then. So it is
    called again, up to a limit: what is missing from the account would be missing every time.
    """
    gaps = []
    for _ in range(MAX_TRIES):
        results = call()
        timings = [account(*result) for result in results]
        gaps += [
            1 - (timing.total_us / 1e6 + CALL_S) / wall_s
            for timing, (_, wall_s) in zip(timings, results, strict=True)
        ]
        if min(gaps) <= TOLERANCE:
            return timings
    raise AssertionError(f"no total within {TOLERANCE:.0%} of what the client waited: {gaps}")


def timed(call: Callable[[], RequestOutput]) -> Result:
    started_at = time.perf_counter()
    output = call()
    return output, time.perf_counter() - started_at


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0, **more)


def in_parallel(client: Client, requests: list[tuple[list[int], SamplingParams]]) -> list[Result]:
    """All at once, each on a call of its own."""
    results: list[Result | None] = [None] * len(requests)

    def run(index: int, prompt: list[int], params: SamplingParams) -> None:
        results[index] = timed(lambda: client.generate(prompt, params))

    threads = [
        threading.Thread(target=run, args=(index, *request))
        for index, request in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [result for result in results if result is not None]
