import time

from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.timings import Stopwatch

micros = st.integers(0, 5_000_000)


def parts_of(timings: pb.Timings) -> dict[str, int]:
    return {field.name: value for field, value in timings.ListFields() if field.name != "total_us"}


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), micros, micros, micros, micros)
def test_the_parts_add_up_to_the_total_whatever_the_clocks_say(
    age_s: float, text_s: float, recovery_s: float, queue: int, forward: int, wire: int, other: int
) -> None:
    watch = Stopwatch(arrived=time.monotonic() - age_s, text_s=text_s, recovery_s=recovery_s)
    core = pb.Timings(
        queue_us=queue, forward_us=forward, wire_us=wire, preempted_us=other, plan_us=other
    )
    timings = watch.total(core)
    assert sum(parts_of(timings).values()) == timings.total_us
    assert (timings.queue_us, timings.forward_us) == (queue, forward)


def test_what_nobody_accounts_for_is_the_wires() -> None:
    watch = Stopwatch(arrived=time.monotonic() - 1, text_s=0.1)
    timings = watch.total(pb.Timings(forward_us=300_000, wire_us=7, total_us=300_007))
    assert timings.detokenize_us == 100_000
    assert 600_000 <= timings.wire_us <= 610_000 + timings.total_us - 1_000_000


def test_time_without_a_core_is_recovery() -> None:
    watch = Stopwatch()
    watch.found()
    assert watch.recovery_s == 0
    watch.lost()
    lost_at = time.monotonic()
    watch.lost()
    while time.monotonic() == lost_at:
        pass
    watch.found()
    assert 0 < watch.recovery_s < 10
