"""Requests that come with what their clients have received."""

import pytest

from scheduler_service.core import GeneratedTokens, SchedulerCore
from scheduler_service.core.config import PolicyName
from tests.support.core_driver import (
    SMALL_CONFIG,
    CoreDriver,
    make_capacity,
    make_driver,
    make_request,
)
from tests.support.symbolic_worker import Sampling, undisturbed


def resume(generated: dict[int, GeneratedTokens], **changes: object) -> CoreDriver:
    driver = make_driver()
    driver.core.submit(make_request(generated=generated, **changes), driver.now)
    return driver


def test_resumed_choices_go_on_from_their_tokens_and_ended_ones_stay_ended() -> None:
    prompt, sampling = [1, 2, 3, 4, 5], Sampling(seed=1)
    expected = [undisturbed(prompt, choice, sampling, frozenset(), 4) for choice in range(4)]
    generated = {
        0: GeneratedTokens(token_ids=expected[0][:2]),
        1: GeneratedTokens(token_ids=expected[1][:1], finished=True),
    }
    driver = resume(generated, num_choices=4)
    plan = driver.schedule("g0")
    assert plan is not None
    # Choices 2 and 3 have nothing yet and share a prefill; choice 0 waits for the block that it
    # will find then, and computes the rest on its own.
    origins = [(new.choice_index, new.parent_seq_id) for new in plan.new_sequences]
    assert origins == [(2, None), (3, 3)]
    tokens: dict[int, list[int]] = {}
    late = []
    while driver.deliver("g0"):
        for plan in (driver.schedule("g0"), driver.schedule("g0")):
            late += plan.new_sequences if plan else []
        outbox = driver.core.pop_outboxes()["f0"]
        for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
    assert [new.token_ids for new in late] == [prompt + expected[0][:2]]
    assert (late[0].num_prompt_tokens, late[0].num_computed_tokens) == (5, 4)
    assert tokens == {1: expected[0][2:], 3: expected[2], 4: expected[3]}
    assert outbox.requests_finished[0].timings.queue_us == 0


@pytest.mark.parametrize(
    ("generated", "stop_token_ids", "finish"),
    [
        (GeneratedTokens(token_ids=[7] * 4), frozenset(), ("length", None)),
        (GeneratedTokens(token_ids=[7, 9]), frozenset({9}), ("stop", 9)),
        (GeneratedTokens(token_ids=[7, 7], finished=True), frozenset(), None),
    ],
)
def test_a_resumed_request_with_all_its_tokens_ends_at_once(
    generated: GeneratedTokens,
    stop_token_ids: frozenset[int],
    finish: tuple[str, int | None] | None,
) -> None:
    driver = resume({0: generated}, stop_token_ids=stop_token_ids)
    outbox = driver.core.pop_outboxes()["f0"]
    finished = [(end.reason, end.stop_token_id) for end in outbox.choices_finished]
    assert finished == ([finish] if finish else [])
    assert [end.handle for end in outbox.requests_finished] == [1]
    assert driver.schedule("g0") is None


def test_a_resumed_choice_at_the_models_length_ends_when_a_group_is_known() -> None:
    core = SchedulerCore(SMALL_CONFIG)
    generated = {0: GeneratedTokens(token_ids=[7] * 59)}
    core.submit(make_request(generated=generated, max_tokens=100), 0.0)
    core.add_worker_group(make_capacity(), 0.0)
    assert core.schedule("g0", 0.0) is None
    outbox = core.pop_outboxes()["f0"]
    assert [end.reason for end in outbox.choices_finished] == ["length"]
    assert [end.handle for end in outbox.requests_finished] == [1]


def test_a_request_that_goes_ahead_is_queued_once_though_a_choice_of_it_is_full() -> None:
    driver = make_driver(
        make_capacity(max_model_len=12),
        max_num_seqs=2,
        max_num_batched_tokens=4,
        policy=PolicyName.PRIORITY,
    )
    driver.submit(prompt=[1] * 3, max_tokens=9, n=2, priority=1)
    driver.schedule("g0")
    generated = {
        0: GeneratedTokens(token_ids=[7] * 7),
        1: GeneratedTokens(token_ids=[8]),
    }
    request = make_request(
        request_id="first", handle=9, num_choices=2, max_tokens=100, generated=generated
    )
    driver.core.submit(request, driver.now)
    plan = driver.schedule("g0")
    assert plan is not None
    assert [new.choice_index for new in plan.new_sequences] == [1]
    driver.core.check()
