"""The online benchmark gives every server the same load, in turns, and sums it up rightly."""

import math
from collections.abc import AsyncGenerator
from typing import Any, Self

import pytest

from benchmarks.online import best_goodput, measure_rates, row
from pagewire_cli.load import Arrival, Lengths, Limits, Percentiles, Received, Summary, Workload

WORKLOAD = Workload(
    num_requests=1,
    rate=1.0,
    input_tokens=Lengths(2, 4),
    output_tokens=Lengths(2, 3),
    vocab_size=1000,
)


class CountingServer:
    """Answers at once, and notes what it was asked; it must not be asked while paused."""

    interface = "calls"

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Arrival] = []
        self.is_running = False
        self.has_ended = False
        self.target = self

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        assert self.is_running
        self.seen.append(arrival)
        for _ in range(arrival.num_output_tokens):
            yield Received(1)

    def pause(self) -> None:
        self.is_running = False

    def resume(self) -> None:
        self.is_running = True

    async def __aenter__(self) -> Self:
        self.resume()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.has_ended = True


class AloneServer(CountingServer):
    """Does not allow another run at the same time."""

    others: list["AloneServer"]

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        assert not any(other.is_running for other in self.others)
        async for number in super().stream(arrival):
            yield number


async def test_all_servers_get_the_same_load_and_are_alone_with_it() -> None:
    one, two = AloneServer("one"), AloneServer("two")
    one.others, two.others = [two], [one]
    rows, _ = await measure_rates(
        [one, two], WORKLOAD, [50.0, 100.0], seconds=0.1, limits=Limits(), repeats=3
    )
    assert one.seen == two.seen
    assert len({tuple(arrival.prompt) for arrival in one.seen}) > 1
    assert [(line["rate"], line["engine"]) for line in rows] == [
        (50.0, "one"),
        (50.0, "two"),
        (100.0, "one"),
        (100.0, "two"),
    ]
    assert [line["num_complete"] for line in rows] == [15, 15, 30, 30]
    assert all(line["num_failed"] == 0 for line in rows)
    assert one.has_ended
    assert two.has_ended


async def test_a_server_that_cannot_answer_at_all_ends_the_benchmark() -> None:
    class Broken(CountingServer):
        async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
            raise ConnectionError("no model")
            yield Received(0)

    server = Broken("broken")
    with pytest.raises(RuntimeError, match="warm up failed: ConnectionError: no model"):
        await measure_rates([server], WORKLOAD, [1.0], seconds=1, limits=Limits(), repeats=1)
    assert server.has_ended


def summary(p50: float, num_good: int) -> Summary:
    """Of ten requests."""
    times = Percentiles(mean=p50, p50=p50, p90=p50, p99=p50)
    return Summary(
        duration_s=10.0,
        num_complete=9,
        num_failed=1,
        num_unfinished=0,
        errors={"it broke": 1},
        max_in_flight=3,
        requests_per_s=0.9,
        output_tokens_per_s=p50,
        total_tokens_per_s=p50,
        cached_prompt_percent=0.0,
        accepted_drafts_percent=0.0,
        drafts_accepted_percent=0.0,
        first_token_ms=times,
        inter_token_ms=None if math.isinf(p50) else times,
        total_ms=times,
        num_good=num_good,
        good_requests_per_s=num_good / 10,
        client_cores=0.1,
    )


def test_a_row_has_medians_of_times_and_sums_of_counts() -> None:
    line = row(CountingServer("one"), 2.0, [summary(5.0, 9), summary(1.0, 6), summary(3.0, 3)])
    assert line["first_token_ms_p99"] == 3.0
    assert line["output_tokens_per_s"] == 3.0
    assert line["good_requests_per_s"] == 0.6
    assert (line["num_complete"], line["num_failed"], line["num_good"]) == (27, 3, 18)
    assert line["good_share"] == 0.6


def test_times_that_are_not_there_are_none() -> None:
    line = row(CountingServer("one"), 2.0, [summary(math.inf, 9)])
    assert line["inter_token_ms_p50"] is None


def test_the_best_rate_is_the_last_before_it_goes_wrong() -> None:
    def line(engine: str, rate: float, share: float) -> dict[str, Any]:
        return {"engine": engine, "rate": rate, "good_share": share}

    rows = [
        *(line("a", 1.0, 1.0), line("a", 2.0, 0.9), line("a", 3.0, 0.89), line("a", 4.0, 1.0)),
        *(line("b", 1.0, 0.5), line("b", 2.0, 1.0)),
    ]
    assert best_goodput(rows) == {"a": 2.0, "b": 0.0}
