"""A client's span goes on through the services that its request goes through."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from pagewire_client import Client, SamplingParams
from scheduler_service.core.request_timing import RequestEvent
from scheduler_service.core_service.tracing import phases
from tests.support.cluster import Cluster
from tests.support.otlp_collector import Collector, collecting

FRONTEND, CORE, WORKER = "pagewire-frontend", "pagewire-scheduler", "pagewire-worker"
PROMPT = list(range(3, 60))
FAST = ("--simulate-step-us", "2000")
SLOW = ("--simulate-step-us", "200000")
"""Slow enough for a test that reads 10 tokens of 60 to kill the worker before it is done."""


@contextmanager
def deployment(
    folder: Path, collector: Collector, *worker_flags: str, core_flags: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    """Services that have exported all they had when it is left."""
    flags = ["--otlp-endpoint", collector.endpoint]
    with Cluster(
        folder,
        worker_flags=["--simulate", *FAST, *flags, *worker_flags],
        core_flags=[*flags, *core_flags],
        frontend_flags=[*flags, "--http", "127.0.0.1:0"],
    ) as cluster:
        yield cluster.start()


def test_a_clients_span_has_those_of_frontend_core_and_worker_below_it(tmp_path: Path) -> None:
    with collecting() as collector:
        with deployment(tmp_path, collector) as cluster:
            tracer = TracerProvider().get_tracer("test")
            with (
                Client(cluster.frontend_address()) as client,
                tracer.start_as_current_span("mine") as mine,
            ):
                params = SamplingParams(max_tokens=20, ignore_eos=True)
                output = client.generate(PROMPT, params, request_id="traced")
        # The services have ended, and exported what they had.
        [request] = collector.of(FRONTEND, "pagewire.generate")
        [scheduled] = collector.of(CORE, "pagewire.schedule")
        context = mine.get_span_context()
        assert request.trace_id == scheduled.trace_id == f"{context.trace_id:032x}"
        assert request.parent_id == f"{context.span_id:016x}"
        assert scheduled.parent_id == request.span_id
        assert request.attributes["pagewire.request_id"] == "traced"
        assert request.attributes["pagewire.outcome"] == "ok"
        assert request.attributes["gen_ai.request.model"] == "simulated"
        assert not request.is_error
        assert request.attributes["gen_ai.usage.output_tokens"] == 20
        assert output.timings is not None
        assert request.attributes["pagewire.forward_us"] == output.timings.forward_us
        [tokenize] = collector.of(FRONTEND, "tokenize")
        assert tokenize.parent_id == request.span_id
        parts = [span for span in collector.spans if span.parent_id == scheduled.span_id]
        assert [span.name for span in parts] == ["queue", "prefill", "decode"]
        for part in parts:
            assert part.start_ns < part.end_ns
        assert request.start_ns < scheduled.start_ns
        assert scheduled.end_ns < request.end_ns
        assert scheduled.event_names == ["placed", "prefilled", "first token"]
        [executed] = collector.of(WORKER, "pagewire.execute")
        assert (executed.trace_id, executed.parent_id) == (request.trace_id, request.span_id)
        assert executed.attributes["pagewire.group"] == scheduled.attributes["pagewire.groups"]
        assert executed.attributes["pagewire.num_prefill_tokens"] == len(PROMPT)
        assert executed.attributes["pagewire.num_steps"] >= 20
        assert executed.attributes["pagewire.forward_us"] >= 20 * 2000 * 0.8
        assert executed.event_names == ["started", "first token"]
        assert scheduled.start_ns < executed.start_ns
        assert executed.events[1].time_ns < scheduled.events[2].time_ns, (
            "it took its way to the core"
        )


def test_a_traceparent_over_http_reaches_the_worker_if_it_is_recorded(tmp_path: Path) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"model": "simulated", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    with collecting() as collector:
        with deployment(tmp_path, collector) as cluster:
            for recorded in ("00", "01"):
                headers = {"traceparent": f"00-{trace_id}-{span_id}-{recorded}"}
                url = f"{cluster.http_url()}/v1/completions"
                assert "[DONE]" in httpx.post(url, json=body, headers=headers, timeout=60).text
        [request] = collector.of(FRONTEND, "pagewire.generate")
        [executed] = collector.of(WORKER, "pagewire.execute")
        assert (request.trace_id, request.parent_id) == (trace_id, span_id)
        assert (executed.trace_id, executed.parent_id) == (trace_id, request.span_id)
        assert {span.trace_id for span in collector.spans} == {trace_id}


def test_one_whose_worker_is_lost_is_seen_on_the_next_one(tmp_path: Path) -> None:
    with collecting() as collector:
        with (
            deployment(tmp_path, collector, *SLOW) as cluster,
            Client(cluster.frontend_address()) as client,
        ):
            deltas = iter(client.stream(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True)))
            for _ in range(10):
                next(deltas)
            cluster.workers[0].kill()
            cluster.start_worker(*FAST)
            num_left = len(list(deltas))
            assert num_left > 0
        [scheduled] = collector.of(CORE, "pagewire.schedule")
        assert scheduled.attributes["pagewire.num_worker_losses"] == 1
        placed = [event for event in scheduled.events if event.name == "placed"]
        names = [name for name in scheduled.event_names if name in ("placed", "worker lost")]
        assert names == ["placed", "worker lost", "placed"]
        [executed] = collector.of(WORKER, "pagewire.execute")  # the other's died with it
        assert executed.attributes["pagewire.group"] == placed[1].attributes["pagewire.group"]
        assert executed.attributes["pagewire.num_prefill_tokens"] >= len(PROMPT) + 10


@pytest.mark.parametrize(
    ("events", "spans"),
    [
        pytest.param(
            "QUEUED 0 5, PLACED 1 0, STARTED 10 5, PREFILLED 20 3, PREFILLED 30 5,"
            "FIRST_TOKEN 30 6, SWAPPED_OUT 50 9, SWAPPED_IN 60 9, STARTED 60 9, WORKER_LOST 70 9,"
            "STARTED 90 9, PREFILLED 95 9, ENDED 99 12",
            "queue 0, prefill 10, decode 30, preempted 50, decode 60, recovery 70, prefill 90,"
            "decode 95, end 99",
            id="preemptions and losses leave no gaps",
        ),
        pytest.param(
            "QUEUED 0 5, STARTED 10 5, PREEMPTED 20 5, PREFILLED 30 5, FIRST_TOKEN 30 6,"
            "STARTED 40 6, PREFILLED 50 6, ENDED 99 12",
            "queue 0, prefill 10, preempted 20, prefill 40, decode 50, end 99",
            id="a first token that comes late does not end a preemption",
        ),
        pytest.param(
            "QUEUED 0 5, PLACED 1 0, WORKER_LOST 10 5, PLACED 20 1, STARTED 30 5, ENDED 40 5",
            "queue 0, prefill 30, end 40",
            id="a request that has not begun is in the queue though its worker is lost",
        ),
        pytest.param(
            "RESUMED 0 9, PLACED 1 0, STARTED 10 9, PREFILLED 20 9, ENDED 50 12",
            "recovery 0, prefill 10, decode 20, end 50",
            id="one that comes to a new core with tokens decodes once they are computed",
        ),
        pytest.param(
            "QUEUED 0 5, STARTED 10 5, PREFILLED 20 3, PREFILLED 30 5, ENDED 50 9",
            "queue 0, prefill 10, decode 30, end 50",
            id="a search that returns no tokens decodes once its prompt is computed",
        ),
    ],
)
def test_phases_follow_one_another(events: str, spans: str) -> None:
    entries = [
        (RequestEvent[name], int(at), int(num_tokens))
        for name, at, num_tokens in map(str.split, events.split(","))
    ]
    starts = [(name, int(at)) for name, at in map(str.split, spans.split(","))]
    expected = [(name, at, end) for (name, at), (_, end) in pairwise(starts)]
    assert list(phases(entries)) == expected
