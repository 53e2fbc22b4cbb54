"""A client's span goes on through the services that its request goes through."""

from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from pagewire_client import Client, SamplingParams
from scheduler_service.core.timeline import RequestEvent
from scheduler_service.core_service.request_spans import phases
from tests.support.cluster import Cluster
from tests.support.otlp_collector import collecting

FRONTEND, CORE = "pagewire-frontend", "pagewire-scheduler"
PROMPT = list(range(3, 60))


def test_a_clients_span_has_those_of_frontend_and_core_below_it(tmp_path: Path) -> None:
    with collecting() as collector:
        flags = ["--otlp-endpoint", collector.endpoint]
        with Cluster(
            tmp_path,
            worker_flags=["--simulate", "--simulate-step-us", "2000"],
            core_flags=flags,
            frontend_flags=flags,
        ) as cluster:
            cluster.start()
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


def test_a_request_without_a_clients_span_begins_a_trace(tmp_path: Path) -> None:
    with collecting() as collector:
        flags = ["--otlp-endpoint", collector.endpoint]
        with Cluster(
            tmp_path, worker_flags=["--simulate"], core_flags=flags, frontend_flags=flags
        ) as cluster:
            cluster.start()
            with Client(cluster.frontend_address()) as client:
                client.generate(PROMPT, SamplingParams(max_tokens=3))
        [request] = collector.of(FRONTEND, "pagewire.generate")
        assert request.parent_id == "", "the first of its trace"
        assert len(collector.of(CORE, "pagewire.schedule")) == 1


def test_phases_tell_of_preemptions_and_losses_without_gaps() -> None:
    event = RequestEvent
    entries = [
        (event.QUEUED, 0, 5),
        (event.PLACED, 1, 0),
        (event.STARTED, 10, 5),
        (event.PREFILLED, 20, 3),
        (event.PREFILLED, 30, 5),
        (event.FIRST_TOKEN, 30, 6),
        (event.SWAPPED_OUT, 50, 9),
        (event.SWAPPED_IN, 60, 9),
        (event.WORKER_LOST, 70, 9),
        (event.STARTED, 90, 9),
        (event.PREFILLED, 95, 9),
        (event.ENDED, 99, 12),
    ]
    assert list(phases(entries)) == [
        ("queue", 0, 10),
        ("prefill", 10, 30),
        ("decode", 30, 50),
        ("preempted", 50, 60),
        ("decode", 60, 70),
        ("recovery", 70, 90),
        ("prefill", 90, 95),
        ("decode", 95, 99),
    ]
