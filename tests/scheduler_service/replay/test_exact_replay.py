"""A replay of a recording gives the same plans and outputs, or the first that differ."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from scheduler_service.core import PolicyName, SchedulerConfig, TenantConfig
from scheduler_service.errors import QueueFull
from scheduler_service.replay.report import difference_lines, plans_table
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.recorded import Recorder, Recording, random_life

CONFIG = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16, max_queue_requests=5)


def recorded_life(*, seed: int = 1, num_moves: int = 400, with_plans: bool = False) -> Recording:
    recorder = Recorder(with_plans=with_plans)
    random_life(CoreDriver(CONFIG, recorder.make_core), seed, num_moves)
    return recorder.recordings[0]


def one_request(*, with_plans: bool = False) -> Recording:
    """A request that generates eight tokens and would stop at token 31, which does not come."""
    recorder = Recorder(with_plans=with_plans)
    driver = CoreDriver(CONFIG, recorder.make_core)
    driver.add_worker_group(make_capacity())
    record = driver.submit(prompt=[1, 2, 3], max_tokens=8, stop_token_ids=frozenset({31}))
    driver.run_until_idle()
    assert len(record.choices[0].tokens) == 8
    return recorder.recordings[0]


def test_thousands_of_plans_of_a_random_life_come_out_again() -> None:
    recording = recorded_life(num_moves=9000)
    summary = recording.replay()
    assert summary.is_exact
    assert summary.num_plans > 2000
    assert summary.num_requests > 300
    assert summary.num_plans == sum(
        entry.do == "schedule" and entry.chain is not None for entry in recording.entries()
    )
    assert {entry.do for entry in recording.entries()} > {"abort", "cancel", "expire"}
    assert any(entry.raised and entry.raised[0] == "QueueFull" for entry in recording.entries())


def test_a_recording_with_plans_has_the_same_hashes_and_the_plans() -> None:
    plain, whole = recorded_life(), recorded_life(with_plans=True)
    assert whole.replay().is_exact
    entries = list(whole.entries())
    assert [entry.chain for entry in entries] == [entry.chain for entry in plain.entries()]
    assert all(
        (entry.plan is None) == (entry.do != "schedule" or not entry.chain) for entry in entries
    )


def test_reworded_messages_of_errors_are_no_difference() -> None:
    recording = recorded_life(num_moves=2000)
    index = recording.find("submit", lambda data: "raised" in data)
    recording.change(index, lambda data: data["raised"].__setitem__(1, "worded otherwise"))
    assert recording.replay().is_exact


def test_asking_whether_a_group_is_drained_changes_nothing() -> None:
    """With fair shares a tenant's account is lifted when the queue is sorted again."""
    recorder = Recorder()
    config = replace(
        CONFIG,
        max_num_seqs=2,
        policy=PolicyName.FAIR,
        tenants={"small": TenantConfig(max_kv_blocks=4)},
    )
    driver = CoreDriver(config, recorder.make_core)
    for group_id in ("g0", "g1", "g2"):
        driver.add_worker_group(make_capacity(group_id))
    for num_tokens in (11, 5):  # the second would exceed the tenant's blocks
        driver.submit(prompt=[1] * num_tokens, max_tokens=4, tenant="small")
    driver.drain_worker_group("g2")
    driver.schedule("g0")
    driver.lose_worker_group("g0")
    assert driver.core.is_drained("g2")
    for num_tokens, max_tokens in ((6, 6), (12, 2)):
        driver.submit(prompt=[2] * num_tokens, max_tokens=max_tokens, tenant="other")
    driver.run_until_idle()
    recorder.check()


def test_a_changed_token_shows_in_the_first_plan_that_depends_on_it() -> None:
    recording = one_request()
    index = recording.find("update", lambda data: data["result"]["step_id"] == 4)
    now = json.loads(recording.lines[index])["now"]
    recording.change(index, lambda data: data["result"].update(token_ids=[31]))
    summary = recording.replay()
    assert not summary.is_exact
    assert summary.output_difference is not None
    assert summary.output_difference.entry.line == index + 2
    next_plan = recording.find("schedule", lambda data: "chain" in data and data["now"] >= now)
    assert summary.num_plans == 4
    assert summary.difference is not None
    assert summary.difference.entry.line == next_plan + 1
    assert summary.difference.number == next_plan
    assert summary.difference.plan is None
    assert difference_lines("first difference", summary.difference) == [
        f"first difference: schedule, input {next_plan} (line {next_plan + 1}), "
        "0.004000 s after the first",
        "  group:    g0",
        f"  recorded: hash {summary.difference.entry.chain}",
        "  replayed: nothing to do",
    ]


def test_a_token_that_only_frontends_see_leaves_the_plans_equal() -> None:
    recording = one_request()
    index = recording.find("update", lambda data: data["result"]["step_id"] == 4)
    recording.change(index, lambda data: data["result"].update(token_ids=[30]))
    summary = recording.replay()
    assert not summary.is_exact
    assert summary.difference is None
    assert summary.num_plans == 8
    assert summary.output_difference is not None
    assert summary.output_difference.entry.line == index + 2


def test_recorded_plans_are_shown_beside_the_replayed_ones() -> None:
    recording = one_request(with_plans=True)
    index = recording.find("submit", bool)
    recording.change(index, lambda data: data["request"]["prompt_token_ids"].append(7))
    difference = recording.replay().difference
    assert difference is not None
    assert difference.plan is not None
    console = Console(width=100)
    with console.capture() as capture:
        console.print(plans_table(difference))
    shown = capture.get()
    assert "new 1 choice=0 prompt=3 output=0 [0]" in shown
    assert "new 1 choice=0 prompt=4 output=0 [0]" in shown
    assert "rows 1:3*" in shown
    assert "rows 1:4*" in shown
    assert shown.count("≠") == 2


def test_a_refusal_must_come_out_as_it_was_recorded() -> None:
    recorder = Recorder()
    driver = CoreDriver(CONFIG, recorder.make_core)
    for _ in range(CONFIG.max_queue_requests):
        driver.submit(prompt=[1], max_tokens=1)
    with pytest.raises(QueueFull):
        driver.submit(prompt=[1], max_tokens=1)
    recording = recorder.recordings[0]
    assert recording.replay().is_exact
    assert recording.replay().num_requests == CONFIG.max_queue_requests

    recording.change(len(recording.lines) - 1, lambda data: data.pop("raised"))
    difference = recording.replay().difference
    assert difference is not None
    assert difference.entry.do == "submit"
    assert difference.raised is not None
    assert difference.raised[0] == "QueueFull"
    assert difference_lines("", difference)[-2] == "  recorded: no error"


def test_a_core_that_fails_in_its_replay_is_a_difference_too() -> None:
    recording = one_request()
    index = recording.find("update", lambda data: data["result"]["step_id"] == 2)
    recording.change(index, lambda data: data["result"].update(step_id=5))
    difference = recording.replay().difference
    assert difference is not None
    assert difference.entry.line == index + 1
    assert difference.raised is not None
    assert difference.raised[0] == "ResultMismatch"
