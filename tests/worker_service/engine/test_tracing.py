"""A request's stays on a worker become spans under the request's own, and cost others nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from service_common.tracing import Tracing
from tests.support.otlp_collector import CollectedSpan, Collector, collecting
from tests.support.plans import new_sequence, step_plan
from worker_service.engine.step_stats import StepMeter
from worker_service.engine.tracing import StreamTraces
from worker_service.plan import (
    RowErrorReason,
    StepResult,
    StepTimings,
    monotonic_us,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RECORDED = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{TRACE}-00f067aa0ba902b8-01"
NOT_RECORDED = f"00-{TRACE}-{SPAN}-00"


def new(seq_id: int, traceparent: str = "", parent: int | None = None, cached: int = 0) -> Any:
    return new_sequence(
        seq_id=seq_id,
        num_computed_tokens=cached,
        parent_seq_id=parent,
        traceparent=traceparent,
    )


class Worker:
    """Steps of 100 microseconds, of which 60 are the forward pass, without pauses."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.tracing = Tracing("worker", "1", collector.endpoint, "here")
        self.meter = StepMeter()
        self.traces = StreamTraces(self.tracing, self.meter, {"pagewire.epoch": 7})
        self.step_id = 0
        self.now_us = self.start_us = monotonic_us() - 60_000_000

    def step(
        self,
        *rows: int,
        new: tuple[Any, ...] = (),
        forget: tuple[int, ...] = (),
        tokens: int = 1,
        sample: bool = True,
        errors: dict[int, RowErrorReason] | None = None,
    ) -> None:
        """Schedule these rows: `rows` maps each sequence to its token count."""
        self.step_id += 1
        size = len(rows)
        plan = step_plan(
            epoch=7,
            step_id=self.step_id,
            forget_seq_ids=forget,
            new_sequences=new,
            seq_ids=rows,
            num_tokens=[tokens] * size,
            output=[int(sample)] * size,
            lookahead=[0] * size,
            received_us=self.now_us,
        )
        timings = StepTimings(
            received_us=self.now_us,
            started_us=self.now_us + 10,
            finished_us=self.now_us + 100,
            cache_ops_us=0,
            forward_us=60,
            sample_us=20,
        )
        ids = np.zeros(size if sample else 0, np.int32)
        result = StepResult(
            epoch=7, step_id=self.step_id, token_ids=ids, errors=errors or {}, timings=timings
        )
        self.traces.record(plan, result)
        self.meter.count(plan, result)
        self.now_us += 100

    def spans(self) -> list[CollectedSpan]:
        """All that were ended."""
        self.tracing.close()
        return sorted(self.collector.spans, key=lambda span: span.start_ns)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with collecting() as collector:
        yield Worker(collector)


def test_a_stay_lasts_from_its_plan_to_the_last_step_before_it_is_forgotten(
    worker: Worker,
) -> None:
    worker.step(9)
    worker.step(1, 9, new=(new(1, RECORDED, cached=16),), tokens=8, sample=False)
    worker.step(1, 9, tokens=4)
    worker.step(1, 9)
    worker.step(9, forget=(1,))
    (span,) = worker.spans()
    assert (span.service, span.instance, span.name) == (
        "pagewire-worker",
        "here",
        "pagewire.execute",
    )
    assert (span.trace_id, span.parent_id) == (TRACE, SPAN)
    assert round((span.end_ns - span.start_ns) / 1e3, -2) == 300
    assert span.attributes == {
        "pagewire.epoch": 7,
        "pagewire.first_step_id": 2,
        "pagewire.num_cached_tokens": 16,
        "pagewire.num_prefill_tokens": 12,
        "pagewire.num_steps": 3,
        "pagewire.cache_ops_us": 0,
        "pagewire.forward_us": 180,
        "pagewire.sample_us": 60,
        "pagewire.end": "forgotten",
    }
    assert span.event_names == ["started", "first token"]
    first_token = span.events[1]
    assert round((first_token.time_ns - span.start_ns) / 1e3, -2) == 200


def test_all_choices_of_a_request_are_one_stay(worker: Worker) -> None:
    worker.step(1, 2, new=(new(1, RECORDED), new(2, parent=1)))
    worker.step(2, forget=(1,))
    worker.step(2, 3, new=(new(3, RECORDED),))  # it comes back, while another is here
    worker.step(3, forget=(2,))
    worker.step(9, new=(new(9),), forget=(3,))
    (span,) = worker.spans()
    assert span.attributes["pagewire.num_steps"] == 4


def test_one_that_comes_back_has_another_stay(worker: Worker) -> None:
    worker.step(1, new=(new(1, RECORDED),))
    worker.step(9, new=(new(9),), forget=(1,))
    worker.step(1, 9, new=(new(1, RECORDED, cached=31),))
    worker.step(9, forget=(1,))
    first, second = worker.spans()
    assert first.span_id != second.span_id
    assert first.parent_id == second.parent_id == SPAN
    assert second.attributes["pagewire.num_cached_tokens"] == 31


def test_what_is_not_recorded_leaves_nothing(worker: Worker) -> None:
    worker.step(1, 2, new=(new(1, NOT_RECORDED), new(2)))
    worker.step(1, 2)
    worker.step(9, forget=(1, 2))
    worker.traces.close()
    assert worker.spans() == []


def test_the_end_of_a_stream_ends_its_stays_and_nothing_begins_after_it(worker: Worker) -> None:
    worker.step(1, new=(new(1, RECORDED),))
    worker.step(1)
    worker.traces.close()
    worker.step(1, 2, new=(new(2, OTHER),))
    worker.traces.close()
    (span,) = worker.spans()
    assert span.attributes["pagewire.end"] == "stream ended"
    assert span.attributes["pagewire.num_steps"] == 2


def test_a_stay_ends_though_no_plan_says_so_and_goes_on_if_one_comes(worker: Worker) -> None:
    worker.step(1, new=(new(1, RECORDED),))
    worker.traces.end_idle()
    worker.traces.end_idle()
    worker.step(1)
    worker.step(9, forget=(1,))
    first, second = worker.spans()
    assert first.attributes["pagewire.end"] == "idle"
    assert second.attributes["pagewire.end"] == "forgotten"
    assert [span.attributes["pagewire.num_steps"] for span in (first, second)] == [1, 1]


def test_a_stay_with_recent_steps_is_not_idle(worker: Worker) -> None:
    worker.now_us = monotonic_us()
    worker.step(1, new=(new(1, RECORDED),))
    worker.traces.end_idle()
    worker.traces.close()
    (span,) = worker.spans()
    assert span.attributes["pagewire.end"] == "stream ended"


def test_a_row_that_fails_is_an_event(worker: Worker) -> None:
    errors = {1: RowErrorReason.NON_FINITE_LOGITS}
    worker.step(2, 1, new=(new(2), new(1, RECORDED)), errors=errors)
    worker.traces.close()
    (span,) = worker.spans()
    [failed] = [event for event in span.events if event.name == "row failed"]
    assert failed.attributes == {"error.type": "NON_FINITE_LOGITS"}
