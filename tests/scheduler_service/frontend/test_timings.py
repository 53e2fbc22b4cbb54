import time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.timings import PARTS, Stopwatch

micros = st.integers(0, 5_000_000)
seconds = st.floats(0, 10)


def parts_of(timings: pb.Timings) -> dict[str, int]:
    return {field.name: value for field, value in timings.ListFields() if field.name != "total_us"}


def wait_a_moment() -> None:
    """Until the clock has moved on."""
    now = time.monotonic()
    while time.monotonic() == now:
        pass


def test_the_parts_are_those_of_the_contract() -> None:
    fields = {field.name for field in pb.Timings.DESCRIPTOR.fields}
    counts = {"num_inexact_recoveries", "num_accepted_drafts", "num_drafts"}
    assert {f"{part}_us" for part in PARTS} == fields - counts - {"total_us"}


@given(seconds, seconds, seconds, seconds, seconds, st.tuples(*[micros] * 6))
def test_the_parts_add_up_to_the_total_whatever_the_clocks_say(
    age_s: float,
    model_wait_s: float,
    tokenize_s: float,
    recovery_s: float,
    unaccounted_s: float,
    core_parts: tuple[int, ...],
) -> None:
    watch = Stopwatch(
        arrived=time.monotonic() - age_s,
        model_wait_s=model_wait_s,
        tokenize_s=tokenize_s,
        recovery_s=recovery_s,
        unaccounted_s=unaccounted_s,
    )
    names = ("queue_us", "forward_us", "wire_us", "preempted_us", "plan_us", "recovery_us")
    core = pb.Timings(**dict(zip(names, core_parts, strict=True)))
    timings = watch.total(core)
    assert sum(parts_of(timings).values()) == timings.total_us
    assert timings.forward_us == core.forward_us
    assert timings.queue_us == core.queue_us + round(model_wait_s * 1e6)
    assert timings.wire_us >= core.wire_us


def test_what_nobody_accounts_for_is_the_wires() -> None:
    watch = Stopwatch(arrived=time.monotonic() - 1, tokenize_s=0.1, last_text_s=0.05)
    timings = watch.total(pb.Timings(forward_us=300_000, wire_us=7, total_us=300_007))
    assert timings.detokenize_us == 150_000
    assert timings.wire_us == pytest.approx(timings.total_us - 450_000)
    assert timings.total_us >= 1_000_000


def test_time_until_another_core_is_sent_the_request_is_recovery() -> None:
    watch = Stopwatch()
    watch.submitted()
    watch.accepted()
    assert (watch.recovery_s, watch.unaccounted_s) == (0, 0)
    watch.lost()
    wait_a_moment()
    watch.lost()
    wait_a_moment()
    watch.submitted()
    assert 0 < watch.recovery_s < 10


def test_time_under_a_core_that_was_lost_is_not_accounted_for() -> None:
    watch = Stopwatch()
    watch.submitted()
    watch.accepted()
    wait_a_moment()
    watch.lost()
    assert watch.unaccounted_s > 0
    assert watch.recovery_s == 0


def test_a_core_that_never_took_the_request_took_no_account_along() -> None:
    watch = Stopwatch()
    watch.submitted()
    wait_a_moment()
    watch.lost()
    assert watch.unaccounted_s == 0
    assert watch.recovery_s > 0


def test_a_request_that_no_core_has_been_sent_loses_none() -> None:
    watch = Stopwatch()
    watch.lost()
    wait_a_moment()
    watch.submitted()
    assert (watch.recovery_s, watch.unaccounted_s) == (0, 0)


def test_tokens_tell_the_time_since_those_before() -> None:
    watch = Stopwatch()
    assert watch.record_tokens() is None
    first = watch.first_token_s
    wait_a_moment()
    gap_s = cast(float, watch.record_tokens())
    assert gap_s > 0
    assert watch.first_token_s == first
    assert watch.decode_s == pytest.approx(gap_s)
