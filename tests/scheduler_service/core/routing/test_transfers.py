"""Requests that move take their KV along, and their timings say how long they waited for it."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from scheduler_service.core import ContextKind, ContextPart
from scheduler_service.core.config import CacheGroup, CacheLifetime, MoveKV, PreemptionMode, Role
from scheduler_service.core.step_plan import StepPlan
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import Sampling

PROMPT = list(range(20))


def two_groups(
    *roles: Role,
    changes: Mapping[str, object] | None = None,
    max_loras: int = 0,
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(block_tokens=32),),
    **config: object,
) -> CoreDriver:
    """Two worker groups that can read each other's KV, but for `changes` of the second one."""
    shape: dict[str, Any] = {
        "cache_groups": cache_groups,
        "max_model_len": 256,
        "max_loras": max_loras,
    }
    groups = [
        replace(
            make_capacity(group_id, **shape),
            role=role,
            kv_layout=(("layout", "one"),),
            addresses=(f"at {group_id}",),
            epoch=7,
        )
        for group_id, role in zip(("g0", "g1"), roles or (Role.BOTH, Role.BOTH), strict=True)
    ]
    driver = make_driver(groups[0], **{"move_kv": MoveKV.ALWAYS, **config})
    driver.add_worker_group(replace(groups[1], **changes or {}))  # type: ignore[arg-type]
    return driver


def test_a_group_that_has_computed_no_prompt_copies_a_long_one() -> None:
    """Its steps are short, so a token of its largest possible step would seem to cost nothing."""
    driver = two_groups(Role.PREFILL, Role.DECODE, move_kv=MoveKV.AUTO, max_num_batched_tokens=512)
    plans: list[tuple[str, StepPlan]] = []
    driver.on_plan = lambda group_id, plan: plans.append((group_id, plan))
    driver.submit(prompt=[4, *(n % 32 for n in range(70))], max_tokens=9)
    driver.run_until_idle()
    assert any(plan.fetches for _, plan in plans)
    plans.clear()
    driver.submit(prompt=[5, *(n % 32 for n in range(200))], max_tokens=9)
    driver.run_until_idle()
    assert any(plan.fetches for _, plan in plans)
    assert all(sum(plan.num_tokens or ()) < 9 for group_id, plan in plans if group_id == "g1")
    plans.clear()
    driver.submit(prompt=[6, *range(30)], max_tokens=9)
    driver.run_until_idle()
    assert not any(plan.fetches for _, plan in plans), "31 tokens are too few"


LONG = [4, *(n % 32 for n in range(70))]


def test_what_a_failed_row_has_computed_is_found_in_no_group() -> None:
    """Its prompt is computed in one group, and it fails in another one."""
    driver = two_groups(Role.PREFILL, Role.DECODE)
    plans: list[tuple[str, StepPlan]] = []
    driver.on_plan = lambda group_id, plan: plans.append((group_id, plan))
    record = driver.submit(prompt=LONG, max_tokens=9, sampling=Sampling(seed=1, fails_at=5))
    driver.run_until_idle()
    assert record.error is not None
    assert {group_id for group_id, plan in plans if plan.fetches} == {"g1"}
    for expected in (0, 64):
        record = driver.submit(prompt=LONG, max_tokens=9)
        driver.run_until_idle()
        assert record.cached_tokens == expected
    driver.check_empty()


def test_copies_that_arrive_after_a_row_has_failed_are_not_found() -> None:
    driver = two_groups(max_num_seqs=1)
    failing = driver.submit(prompt=LONG, max_tokens=30, sampling=Sampling(seed=1, fails_at=9))
    driver.step("g0", times=8)
    record = driver.submit(prompt=LONG, max_tokens=9)
    plan = driver.schedule("g1")
    for _ in range(20):
        if plan is not None and plan.fetches:
            break
        driver.step("g0")
        plan = driver.schedule("g1")
    assert plan is not None
    assert plan.fetches
    assert failing.is_live
    while failing.is_live:
        driver.step("g0")
    driver.run_until_idle()
    assert record.finished is not None
    assert record.cached_tokens == 0
    driver.check_empty()


def kv_moves(driver: CoreDriver) -> list[str]:
    return [group.kv_moves for group in driver.core.snapshot().worker_groups]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "with all"),
        ({"arithmetic": "other"}, "not with {}: another arithmetic"),
        ({"kv_layout": (("layout", "two"),)}, "not with {}: another layout"),
        ({"cache_groups": (CacheGroup(block_tokens=16),)}, "not with {}: another cache groups"),
        ({"model": "other"}, "no other group"),
    ],
)
def test_a_snapshot_says_with_which_groups_kv_moves(
    changes: dict[str, object], expected: str
) -> None:
    driver = two_groups(changes=changes)
    assert kv_moves(driver) == [expected.format("g1"), expected.format("g0")]


def test_a_snapshot_says_why_kv_does_not_move() -> None:
    assert kv_moves(two_groups(move_kv=MoveKV.NEVER)) == ["none: --move-kv never"] * 2
    assert (
        kv_moves(two_groups(enable_prefix_caching=False)) == ["none: the prefix cache is off"] * 2
    )
    driver = two_groups(changes={"kv_layout": ()})
    assert kv_moves(driver) == [
        "not with g1: its workers copy no blocks",
        "none: its workers copy no blocks",
    ]


def test_a_group_without_a_partner_does_everything_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = two_groups(Role.PREFILL, Role.PREFILL)
    assert kv_moves(driver) == ["no group for decoding, so it does both"] * 2
    warnings = [record for record in caplog.records if "no group exchanges KV" in record.message]
    assert [record.message.split()[-3] for record in warnings] == ["group_id=g0", "group_id=g1"]
    record = driver.submit(prompt=PROMPT, max_tokens=9)
    driver.run_until_idle()
    assert len(record.choices[0].tokens) == 9

    caplog.clear()
    driver = two_groups(Role.PREFILL, Role.DECODE)
    assert kv_moves(driver) == ["with all"] * 2
    driver.drain_worker_group("g0")
    assert kv_moves(driver)[1] == "no group for prefills, so it does both"
    assert [r.levelname for r in caplog.records if "group_id=g1" in r.message] == ["WARNING"]


def test_a_long_prompt_is_copied_while_the_rest_is_computed() -> None:
    driver = two_groups(Role.PREFILL, Role.DECODE, max_num_batched_tokens=64)
    plans: list[tuple[str, StepPlan]] = []
    driver.on_plan = lambda group_id, plan: plans.append((group_id, plan))
    record = driver.submit(prompt=[n % 32 for n in range(224)], max_tokens=9)
    driver.run_until_idle()
    assert record.finished is not None
    events: list[tuple[str, int]] = []
    for group_id, plan in plans:
        events += [("copied", len(fetch.blocks) // 2) for fetch in plan.fetches]
        if group_id == "g0" and plan.seq_ids:
            events.append(("computed", sum(plan.num_tokens or ())))
        assert not plan.leases or not plan.seq_ids, "a lease waits for no rows"
    assert [what for what, _ in events].index("copied") < events.index(("computed", 32))
    assert sum(number for what, number in events if what == "copied") == 7
    assert events[-1] == ("copied", 1), "the last block is left"
    plans.clear()
    driver.submit(prompt=[7, *(n % 32 for n in range(223))], max_tokens=1)
    driver.run_until_idle()
    assert not any(plan.leases for _, plan in plans), "it ends where it began"
    driver.check_empty()


def test_a_chunk_that_ends_within_a_block_of_one_group_is_copied_up_to_blocks_of_all() -> None:
    """Chunks of 18 tokens end in the middle of blocks, to which the next ones write."""
    groups = (
        CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=4, span=6),
        CacheGroup(block_tokens=8),
    )
    driver = two_groups(Role.PREFILL, Role.DECODE, cache_groups=groups, max_num_batched_tokens=18)
    copied: list[int] = []
    driver.on_plan = lambda _, plan: copied.extend(len(f.blocks) // 2 for f in plan.fetches)
    record = driver.submit(prompt=LONG[:50], max_tokens=9)
    driver.run_until_idle()
    assert record.finished is not None
    # Up to tokens 16, 32 and 50: two more blocks of all tokens, or three, and those of the window.
    assert copied == [2 + 2, 2 + 2, 3 + 2]
    driver.check_empty()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_request_that_waits_for_kv_has_that_time_in_its_timings(is_lost: bool) -> None:
    driver = two_groups()
    record = driver.submit(prompt=PROMPT, max_tokens=30)
    driver.step("g0", times=6)
    assert len(record.choices[0].tokens) > 0
    driver.drain_worker_group("g0")
    driver.step("g0")  # which begins the lease
    plan = driver.schedule("g1")
    assert plan is not None
    assert plan.fetches
    driver.now += 2.0
    if is_lost:
        driver.lose_worker_group("g0")
    driver.run_until_idle()
    assert record.finished is not None
    assert 2_000_000 <= record.finished.transfer_us < 2_100_000
    assert record.finished.recovery_us < 100_000


def test_copies_that_leave_no_memory_for_their_request_are_given_up_at_once() -> None:
    """The other group has four blocks. Three come with the request: one that its choices share, and
    one of each. Then each of them needs another one."""
    driver = two_groups(changes={"num_gpu_blocks": 4})
    fetched: list[int] = []
    driver.on_plan = lambda _, plan: fetched.extend(len(f.blocks) // 2 for f in plan.fetches)
    record = driver.submit(prompt=[n % 32 for n in range(33)], max_tokens=60, n=2)
    driver.step("g0", times=32)
    driver.drain_worker_group("g0")
    driver.run_until_idle()
    assert fetched == [3]
    assert record.finished is not None
    driver.check_empty()


def run_beside(driver: CoreDriver, records: list[RequestRecord], num_pauses: int) -> None:
    """Run all groups until a request has ended, all of which have begun; each gets a token in every
    round but for this number."""
    rounds: list[list[int]] = []
    while all(record.is_live for record in records):
        for group_id in driver.links:
            driver.step(group_id)
        rounds.append([len(choice.tokens) for r in records for choice in r.choices])
    for counts in zip(*rounds, strict=True):
        assert sum(a == b for a, b in pairwise(counts)) <= num_pauses


def test_as_many_requests_are_handed_over_as_others_have_places_for() -> None:
    driver = two_groups(Role.PREFILL, Role.DECODE, max_num_batched_tokens=64)
    decoding = [driver.submit(prompt=[n, *range(6)], max_tokens=50) for n in range(2)]
    for _ in range(12):
        driver.step("g0")
        driver.step("g1")
    choices = driver.submit(prompt=[9, *range(6)], max_tokens=20, n=3)
    others = [driver.submit(prompt=[n, *range(8)], max_tokens=20) for n in (20, 21)]
    for _ in range(2):
        driver.step("g0")
    assert driver.core.snapshot().num_by_tenant.total() == 5
    run_beside(driver, [*decoding, choices, *others], num_pauses=3)
    driver.run_until_idle()
    driver.check_empty()


def test_a_request_is_handed_over_once_there_is_a_slot_for_its_adapter() -> None:
    driver = two_groups(Role.PREFILL, Role.DECODE, max_loras=1)
    digests = [bytes([number]) * 32 for number in (1, 2)]
    driver.set_adapters({digest: str(digest[0]) for digest in digests})
    contexts = [(ContextPart(ContextKind.ADAPTER, digest),) for digest in digests]
    holding = driver.submit(prompt=PROMPT[:9], max_tokens=60, context=contexts[0])
    for _ in range(12):
        driver.step("g0")
        driver.step("g1")
    other = driver.submit(prompt=PROMPT[:9], max_tokens=20, context=contexts[1])
    driver.step("g0")
    run_beside(driver, [holding, other], num_pauses=1)
    assert holding.is_live
    driver.run_until_idle()
    driver.check_empty()


def test_a_choice_that_ends_while_its_prompt_is_computed_is_not_copied_ahead() -> None:
    driver = two_groups(Role.PREFILL, Role.DECODE, max_num_batched_tokens=64)
    record = driver.submit(prompt=[n % 32 for n in range(224)], max_tokens=9, n=2)
    driver.schedule("g0")
    driver.stop_choice(record, 0, 0)
    driver.deliver("g0")
    driver.run_until_idle()
    assert record.finished is not None
    assert [len(choice.tokens) for choice in record.choices] == [0, 9]
    driver.check_empty()


def test_copies_do_not_keep_the_memory_that_a_swapped_out_request_lacks() -> None:
    """It was swapped in and out again without end, as if it were alone, while the other request,
    which the copies were for, waited for it."""
    chunk = CacheGroup(lifetime=CacheLifetime.CHUNK, block_tokens=4, span=8)
    driver = two_groups(
        changes={"num_gpu_blocks": 12, "num_cpu_blocks": 16},
        cache_groups=(CacheGroup(block_tokens=12), chunk),
        preemption_mode=PreemptionMode.SWAP,
        watermark=0.0,
    )
    moving = driver.submit(prompt=list(range(12)), max_tokens=30, n=3)
    driver.step("g0", times=8)
    staying = driver.submit(prompt=[9, *range(9)], max_tokens=40)
    driver.step("g1", times=9)
    driver.drain_worker_group("g0")
    driver.run_until_idle()
    assert moving.finished is not None
    assert staying.finished is not None
    driver.check_empty()
