"""Prefix cache hits of sequences that share a prefix; the scenarios prefix_*.txt show the rest."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core import SchedulerConfig, StepPlan
from scheduler_service.core.context import Context, ContextKind, ContextPart
from scheduler_service.core.kv_cache.prefix_keys import root_key, unit_keys
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import Sampling

PROMPT = [(3 * i * i + i) % 31 for i in range(40)]


def make_driver(num_gpu_blocks: int = 32, **changes: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 67,
        "watermark": 0.0,
    }
    driver = CoreDriver(SchedulerConfig(**(values | changes)))  # type: ignore[arg-type]
    driver.add_worker_group(make_capacity(num_gpu_blocks=num_gpu_blocks))
    return driver


def plan_of(driver: CoreDriver) -> StepPlan:
    plan = driver.schedule("g0")
    assert plan is not None
    return plan


def num_found(driver: CoreDriver, prompt: list[int], **changes: object) -> int:
    """Tokens of a prompt that its first plan does not compute; its request runs to its end."""
    record = driver.submit(prompt=prompt, max_tokens=1, **changes)  # type: ignore[arg-type]
    [new] = plan_of(driver).new_sequences
    driver.run_until_idle()
    assert record.cached_tokens == new.num_computed_tokens
    return new.num_computed_tokens


def keys_of(tokens: list[int], *context: ContextPart) -> list[bytes]:
    return unit_keys(root_key(context), tokens, 4, context=context)


# Keys.


def test_a_key_has_128_bits_and_depends_on_all_tokens_up_to_its_block() -> None:
    keys = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert [len(key) for key in keys] == [16, 16]
    other_first = keys_of([9, 2, 3, 4, 5, 6, 7, 8])
    other_last = keys_of([1, 2, 3, 4, 5, 6, 7, 9])
    assert len({*keys, *other_first, *other_last}) == 5
    assert other_last[0] == keys[0]


def test_keys_do_not_depend_on_how_many_are_made_at_once() -> None:
    keys = keys_of([1, 2, 3, 4])
    keys += unit_keys(keys[-1], [5, 6, 7, 8, 9, 10, 11, 12], 4)
    assert keys == keys_of(list(range(1, 13)))


PART = ContextPart(ContextKind.MEDIA, bytes(32), start=5, length=2)


@pytest.mark.parametrize(
    "changes",
    [{"kind": ContextKind.ADAPTER}, {"digest": bytes(31) + b"1"}, {"start": 6}, {"length": 0}],
)
def test_each_field_of_a_part_is_in_the_keys_from_its_start_on(changes: dict[str, Any]) -> None:
    tokens = list(range(12))
    keys, others = keys_of(tokens, PART), keys_of(tokens, replace(PART, **changes))
    assert keys[0] == others[0] == keys_of(tokens)[0]
    assert not {*keys[1:]} & {*others[1:], *keys_of(tokens)[1:]}


def test_a_part_at_the_start_is_in_all_keys_in_any_order_with_others() -> None:
    tokens, salt = list(range(12)), replace(PART, kind=ContextKind.SALT, start=0, length=0)
    other = replace(salt, digest=bytes(31) + b"1")
    assert keys_of(tokens, salt, other) == keys_of(tokens, other, salt)
    assert len({*keys_of(tokens), *keys_of(tokens, salt), *keys_of(tokens, salt, other)}) == 9


def test_keys_with_a_part_do_not_depend_on_how_many_are_made_at_once() -> None:
    tokens = list(range(12))
    keys = unit_keys(root_key((PART,)), tokens[:4], 4, context=(PART,))
    keys += unit_keys(keys[-1], tokens[4:], 4, context=(PART,), start=4)
    assert keys == keys_of(tokens, PART)


# What is found.


@pytest.mark.parametrize(
    ("num_tokens", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16), (40, 16)]
)
def test_full_blocks_are_found_except_the_last_token(num_tokens: int, found: int) -> None:
    driver = make_driver()
    driver.submit(prompt=PROMPT[:18], max_tokens=1)
    driver.run_until_idle()
    assert num_found(driver, PROMPT[:num_tokens]) == found


def test_without_prefix_caching_nothing_is_found() -> None:
    driver = make_driver(enable_prefix_caching=False)
    driver.submit(prompt=PROMPT, max_tokens=1)
    driver.run_until_idle()
    assert num_found(driver, PROMPT) == 0


def test_what_a_chunk_computed_is_found_when_its_result_is_in() -> None:
    driver = make_driver(max_num_batched_tokens=10, pipeline_depth=1)
    driver.submit(prompt=PROMPT[:30], max_tokens=1)
    plan_of(driver)
    driver.deliver("g0")
    driver.cancel(driver.records["f0", 1])
    assert num_found(driver, PROMPT) == 8


def test_of_many_that_begin_alike_the_first_alone_computes_what_they_share() -> None:
    driver = make_driver()
    records = [driver.submit(prompt=[*PROMPT[:16], i], max_tokens=1) for i in range(4)]
    assert [len(plan_of(driver).num_tokens), driver.schedule("g0")] == [1, None]
    driver.deliver("g0")
    assert list(plan_of(driver).num_tokens) == [1, 1, 1]
    driver.run_until_idle()
    assert [record.cached_tokens for record in records] == [0, 16, 16, 16]


def test_nobody_waits_for_less_than_half_of_its_tokens() -> None:
    driver = make_driver()
    driver.submit(prompt=PROMPT[:16], max_tokens=1)
    driver.submit(prompt=[*PROMPT[:8], *range(8)], max_tokens=1)
    assert list(plan_of(driver).num_tokens) == [16, 16]


def test_nobody_waits_for_what_is_not_computed_any_more() -> None:
    driver = make_driver(max_num_batched_tokens=10)
    first = driver.submit(prompt=PROMPT[:30], max_tokens=1)
    driver.submit(prompt=PROMPT[:31], max_tokens=1)
    assert len(plan_of(driver).num_tokens) == 1
    driver.cancel(first)
    [new] = plan_of(driver).new_sequences
    assert new.num_computed_tokens == 0
    driver.run_until_idle()


def test_prompt_log_probabilities_that_are_owed_are_computed() -> None:
    driver = make_driver()
    assert num_found(driver, PROMPT) == 0
    assert num_found(driver, PROMPT, sampling=Sampling(seed=1, prompt_logprobs=True)) == 0
    assert num_found(driver, PROMPT) == 36


def test_prompt_log_probabilities_leave_no_gap_where_others_computed_more() -> None:
    driver = make_driver(num_gpu_blocks=12, max_num_batched_tokens=8)
    driver.submit(prompt=PROMPT[:9], max_tokens=1)
    driver.run_until_idle()
    wants = driver.submit(
        prompt=PROMPT[:12], max_tokens=1, sampling=Sampling(seed=1, prompt_logprobs=True)
    )
    # As if 3 tokens had been reported before a preemption: the logits of the third are next.
    [group] = driver.core._registry.seq_groups()
    group.prompt_logprobs_start = wants.num_prompt_logprobs = 4
    [new] = plan_of(driver).new_sequences
    assert new.num_computed_tokens == 0


def test_what_a_failed_row_computed_is_not_found() -> None:
    driver = make_driver()
    failed = driver.submit(prompt=PROMPT, max_tokens=8, sampling=Sampling(seed=1, fails_at=3))
    driver.run_until_idle()
    assert failed.error is not None
    assert num_found(driver, PROMPT) == 0


def test_the_result_of_a_step_before_a_preemption_says_nothing_of_the_blocks_after_it() -> None:
    driver = make_driver(num_gpu_blocks=5, max_num_batched_tokens=8, pipeline_depth=3)
    first = driver.submit(prompt=[1] * 7, max_tokens=9)
    driver.submit(prompt=PROMPT[:12], max_tokens=1)
    assert plan_of(driver).num_tokens == [7]
    assert plan_of(driver).num_tokens == [1, 7]
    driver.deliver("g0")
    assert plan_of(driver).forget_seq_ids == [2], "the second is preempted, its chunk in flight"
    driver.cancel(first)
    assert [new.seq_id for new in plan_of(driver).new_sequences] == [2]
    driver.deliver("g0")
    alike = driver.submit(prompt=PROMPT[:12], max_tokens=1)
    driver.schedule("g0")  # the worker checks what is reused
    driver.run_until_idle()
    assert alike.finished is not None


# What it is good for.


def run_one_beside(driver: CoreDriver, num_tokens: int) -> RequestRecord:
    """A request of `num_tokens` tokens that is decoding and has its first result."""
    record = driver.submit(prompt=PROMPT[:num_tokens], max_tokens=8)
    plan_of(driver)
    driver.deliver("g0")
    return record


def test_a_request_is_placed_where_it_fits_thanks_to_blocks_in_use() -> None:
    driver = make_driver(num_gpu_blocks=6)
    run_one_beside(driver, 16)
    driver.submit(prompt=PROMPT[:17], max_tokens=1)
    [new] = plan_of(driver).new_sequences
    assert new.num_computed_tokens == 16
    driver.run_until_idle()


def test_only_what_is_not_found_counts_against_the_tokens_of_a_whole_prefill() -> None:
    driver = make_driver(enable_chunked_prefill=False)
    run_one_beside(driver, 40)
    driver.submit(prompt=[1] * 40, max_tokens=1)
    driver.submit(prompt=PROMPT, max_tokens=1)
    plan = plan_of(driver)
    assert [new.num_computed_tokens for new in plan.new_sequences] == [0, 36]
    assert plan.num_tokens == [1, 40, 4]
    driver.run_until_idle()


def test_a_preempted_sequence_finds_its_own_prompt_and_output() -> None:
    driver = make_driver(num_gpu_blocks=9, pipeline_depth=1)
    driver.submit(prompt=[1] * 8, max_tokens=12)
    driver.submit(prompt=PROMPT[:8], max_tokens=12)
    found: list[int] = []
    driver.on_plan = lambda _, plan: found.extend(
        new.num_computed_tokens for new in plan.new_sequences
    )
    driver.run_until_idle()
    assert driver.core.snapshot().num_preemptions == 1
    assert found == [0, 0, 16]


# Tenants.


@pytest.mark.parametrize(("isolated", "found"), [(False, 36), (True, 0)])
def test_tenants_share_nothing_where_they_are_isolated(isolated: bool, found: int) -> None:
    driver = make_driver(isolate_tenants=isolated)
    assert num_found(driver, PROMPT, tenant="one") == 0
    assert num_found(driver, PROMPT, tenant="other") == found
    assert num_found(driver, PROMPT, tenant="one") == 36


@pytest.mark.parametrize(("isolated", "count"), [(False, 1), (True, 3)])
def test_workers_know_tenants_apart_where_they_are_isolated(isolated: bool, count: int) -> None:
    driver = make_driver(isolate_tenants=isolated)
    found: dict[str, set[Context]] = {}
    for tenant in ("", "one", "other", "one", "other"):
        driver.submit(prompt=PROMPT, max_tokens=2, n=2, tenant=tenant)
        parent, fork = plan_of(driver).new_sequences
        assert (fork.parent_seq_id, fork.context) == (parent.seq_id, ())
        found.setdefault(tenant, set()).add(parent.context)
        driver.run_until_idle()
    assert found[""] == {()}
    assert all(len(contexts) == 1 for contexts in found.values()), "the same after it was idle"
    assert len(set.union(*found.values())) == count


def salt(digest: bytes) -> Context:
    return (ContextPart(ContextKind.SALT, digest),)


def test_requests_share_prefixes_with_those_of_the_same_salt_and_tenant() -> None:
    driver = make_driver()
    a, b = salt(b"a" * 32), salt(b"b" * 32)
    for tenant in ("", "one"):
        for context in ((), a, b, a + b):
            assert num_found(driver, PROMPT, tenant=tenant, context=context) == 0
            assert num_found(driver, PROMPT, tenant=tenant, context=context) == 36


def test_a_worker_that_joins_after_a_loss_gets_the_context_again() -> None:
    driver = make_driver()
    driver.submit(prompt=PROMPT, max_tokens=9, context=salt(b"a" * 32))
    contexts = [new.context for new in plan_of(driver).new_sequences]
    driver.lose_worker_group("g0")
    driver.add_worker_group(make_capacity())
    contexts += [new.context for new in plan_of(driver).new_sequences]
    driver.run_until_idle()
    assert contexts == [salt(b"a" * 32)] * 2
