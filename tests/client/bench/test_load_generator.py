"""Load: the same for the same seed, sent when due, and summed up rightly."""

import asyncio
import math
from collections.abc import AsyncGenerator
from itertools import pairwise
from statistics import fmean

import pytest

from pagewire_cli.load.load_generator import LoadRun, Received, RequestRecord
from pagewire_cli.load.summary import Limits, Percentiles, Summary
from pagewire_cli.load.workload import Arrival, Lengths, Workload


def workload(**changes: object) -> Workload:
    settings: dict[str, object] = {
        "num_requests": 50,
        "rate": 10.0,
        "input_tokens": Lengths(4, 9),
        "output_tokens": Lengths(2, 5),
        "vocab_size": 1000,
    }
    return Workload(**(settings | changes))  # type: ignore[arg-type]


def gaps(arrivals: list[Arrival]) -> list[float]:
    return [after.due_s - before.due_s for before, after in pairwise(arrivals)]


def test_a_seed_says_what_arrives_and_when() -> None:
    assert workload().arrivals(3) == workload().arrivals(3)
    assert workload().arrivals(3) != workload().arrivals(4)


def test_another_rate_stretches_the_same_arrivals() -> None:
    slow, fast = workload(rate=5.0).arrivals(1), workload(rate=20.0).arrivals(1)
    assert [a.prompt for a in slow] == [a.prompt for a in fast]
    assert [a.due_s for a in slow] == pytest.approx([4 * a.due_s for a in fast])


def test_gaps_are_those_of_a_poisson_process() -> None:
    """Exponential: their mean is the rate's inverse, and so is their standard deviation."""
    seen = gaps(workload(num_requests=20_000).arrivals(0))
    mean = fmean(seen)
    deviation = math.sqrt(fmean((gap - mean) ** 2 for gap in seen))
    assert mean == pytest.approx(0.1, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)
    # Memoryless: of the gaps longer than the mean, the excess has the mean again.
    assert fmean(gap - mean for gap in seen if gap > mean) == pytest.approx(mean, rel=0.05)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert {a.due_s for a in workload(rate=math.inf).arrivals(0)} == {0.0}


def test_lengths_and_tokens_stay_within_what_was_asked() -> None:
    arrivals = workload(num_requests=500).arrivals(0)
    assert {len(a.prompt) for a in arrivals} == set(range(4, 10))
    assert {a.num_output_tokens for a in arrivals} == set(range(2, 6))
    assert all(10 <= token < 1000 for a in arrivals for token in a.prompt)


def test_prompts_share_their_prefix_and_no_more() -> None:
    arrivals = workload(prefix_tokens=8, vocab_size=2**20).arrivals(0)
    assert len({tuple(a.prompt[:8]) for a in arrivals}) == 1
    assert len({a.prompt[8] for a in arrivals}) == len(arrivals)
    assert workload(prefix_tokens=8).max_total_tokens == 8 + 9 + 5


def test_a_vocabulary_without_ordinary_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size must be above 10, not 10"):
        workload(vocab_size=10)


def test_lengths_are_a_number_or_a_range() -> None:
    assert Lengths.parse("7") == Lengths(7, 7)
    assert Lengths.parse("7-20") == Lengths(7, 20)
    assert (str(Lengths(7, 7)), str(Lengths(7, 20))) == ("7", "7-20")


@pytest.mark.parametrize("text", ["", "x", "0", "9-2", "3-", "-3", "1.5", "1-x"])
def test_no_other_text_is_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)


def test_percentiles_lie_between_their_neighbours() -> None:
    found = Percentiles.of([0.04, 0.01, 0.03, 0.02])
    assert found == Percentiles(mean=25.0, p50=25.0, p90=37.0, p99=39.7)
    assert Percentiles.of([0.005]) == Percentiles(mean=5.0, p50=5.0, p90=5.0, p99=5.0)


def test_percentiles_are_in_milliseconds() -> None:
    assert Percentiles.of([0.001, 0.003]) == Percentiles(mean=2.0, p50=2.0, p90=2.8, p99=2.98)
    assert Percentiles.of([]) is None


def record(
    *token_times_s: float, started_s: float = 0.0, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        num_prompt_tokens=10,
        num_output_tokens=len(token_times_s),
        started_s=started_s,
        token_times_s=list(token_times_s),
        ended_s=token_times_s[-1] if token_times_s else started_s,
        error=error,
    )


def test_a_record_tells_its_times() -> None:
    seen = record(1.5, 1.5, 2.5, started_s=1.0)
    assert seen.first_token_s == 0.5
    assert seen.inter_token_s == [0.0, 1.0]
    assert seen.mean_inter_token_s == 0.5
    assert seen.total_s == 1.5
    assert record(2.0).mean_inter_token_s == 0.0


def test_goodput_counts_what_keeps_both_limits() -> None:
    limits = Limits(first_token_s=1.0, inter_token_s=0.5)
    assert limits.are_kept(record(1.0, 1.5, 2.0))
    assert limits.are_kept(record(1.0, 1.9, 2.0)), "the mean counts, not each gap"
    assert not limits.are_kept(record(1.1, 1.2))
    assert not limits.are_kept(record(0.5, 1.1))
    assert not limits.are_kept(record(0.5, 0.6, error="gone"))


class ScriptedTarget:
    """Answers as an arrival's prompt says: `[FAIL, …]` fails, `[HOLD, …]` waits to be let go."""

    FAIL, HOLD, SHORT = 1, 2, 3

    def __init__(self, num_together: int = 1) -> None:
        """Nothing is answered before `num_together` streams are open."""
        self.go = asyncio.Event()
        self.together = asyncio.Barrier(num_together)
        self.num_open = 0
        self.max_open = 0
        self.num_closed = 0

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await self.together.wait()
            yield Received(1)
            if arrival.prompt[0] == self.FAIL:
                raise ConnectionError("it broke")
            if arrival.prompt[0] == self.HOLD:
                await self.go.wait()
            if arrival.prompt[0] != self.SHORT:
                yield Received(arrival.num_output_tokens - 1)
        finally:
            self.num_open -= 1
            self.num_closed += 1


def asked(first: int = 0, num_output_tokens: int = 3) -> Arrival:
    return Arrival(0.0, [first, 50, 50], num_output_tokens)


async def test_every_request_is_recorded_whatever_became_of_it() -> None:
    target = ScriptedTarget()
    ended: list[RequestRecord] = []
    arrivals = [asked(), asked(target.FAIL), asked(target.SHORT)]
    run = LoadRun(target, arrivals, on_end=ended.append)
    await run.run()
    assert len(ended) == 3
    errors = [record.error for record in run.records]
    assert errors == [
        None,
        "ConnectionError: it broke",
        "RuntimeError: expected 3 tokens, got 1",
    ]
    summary = Summary.of(run, Limits())
    assert (summary.num_complete, summary.num_failed, summary.num_good) == (1, 2, 1)
    assert summary.errors["ConnectionError: it broke"] == 1
    assert summary.output_tokens_per_s == pytest.approx(3 / run.duration_s, rel=0.01)
    assert summary.total_tokens_per_s == pytest.approx(6 / run.duration_s, rel=0.01)


async def test_one_slow_answer_holds_no_other_back() -> None:
    target = ScriptedTarget(num_together=3)

    def on_end(_: RequestRecord) -> None:
        if target.num_closed == 2:
            target.go.set()

    arrivals = [asked(target.HOLD), asked(), asked()]
    run = LoadRun(target, arrivals, on_end=on_end)
    async with asyncio.timeout(60):
        await run.run()
    assert run.max_in_flight == 3


async def test_a_limit_on_concurrency_is_kept_and_its_wait_not_counted() -> None:
    target = ScriptedTarget(num_together=2)
    run = LoadRun(target, [asked() for _ in range(6)], concurrency=2)
    await run.run()
    assert target.max_open == run.max_in_flight == 2
    assert [record.started_s for record in run.records[:2]] == [0.0, 0.0]
    assert run.records[-1].started_s > 0.0, "all were due at once, but it had to wait"


async def test_a_run_that_is_cancelled_keeps_what_it_saw() -> None:
    target = ScriptedTarget()
    one_ended = asyncio.Event()
    run = LoadRun(target, [asked(), asked(target.HOLD)], on_end=lambda _: one_ended.set())
    task = asyncio.create_task(run.run())
    await one_ended.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert target.num_closed == 2, "no stream is left open"
    summary = Summary.of(run, Limits())
    assert (summary.num_complete, summary.num_failed, summary.num_unfinished) == (1, 0, 1)


async def test_nothing_complete_is_no_percentiles() -> None:
    target = ScriptedTarget()
    run = LoadRun(target, [asked(target.FAIL)])
    await run.run()
    summary = Summary.of(run, Limits())
    assert summary.first_token_ms is None
    assert summary.good_requests_per_s == 0
