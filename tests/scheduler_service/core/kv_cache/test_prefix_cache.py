"""Prefix cache hits of sequences that share a prefix; the scenarios prefix_*.txt show the rest."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core import SchedulerConfig, StepPlan
from scheduler_service.core.context import Context, ContextKind, ContextPart
from scheduler_service.core.kv_cache.prefix_keys import root_key, unit_keys
from tests.support.core_driver import CoreDriver, make_capacity
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


def test_prompt_log_probabilities_leave_no_gap_where_others_computed_more() -> None:
    driver = make_driver(num_gpu_blocks=12, max_num_batched_tokens=8)
    driver.submit(prompt=PROMPT[:9], max_tokens=1)
    driver.run_until_idle()
    wants = driver.submit(
        prompt=PROMPT[:12], max_tokens=1, sampling=Sampling(seed=1, prompt_logprobs=True)
    )
    # As if 3 tokens had been reported before a preemption: the logits of the third are next.
    [group] = driver.core.requests.seq_groups()
    group.prompt_logprobs_start = wants.num_prompt_logprobs = 4
    [new] = plan_of(driver).new_sequences
    assert new.num_computed_tokens == 0


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
