"""What is refused at the door, and what waits: errors in full."""

from dataclasses import replace

import pytest

from scheduler_service.core import ContextKind, ContextPart, GeneratedTokens, SchedulerCore
from scheduler_service.core.config import CacheGroup, CacheLifetime
from scheduler_service.errors import (
    DuplicateRequest,
    InvalidArgument,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    UnknownRequest,
)
from tests.support.core_driver import (
    SMALL_CONFIG,
    make_capacity,
    make_driver,
    make_request,
)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1, 32]}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_choices": 0}, "num_choices"),
        ({"num_choices": 5}, "num_choices"),
        ({"generated": {1: GeneratedTokens(token_ids=[1])}}, "resume"),
        ({"generated": {0: GeneratedTokens(token_ids=[1] * 5)}}, "resume"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    core = make_driver().core
    with pytest.raises(InvalidArgument) as caught:
        core.submit(make_request(**changes), 0.0)
    assert caught.value.field == field
    assert core.snapshot().num_waiting == 0


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_the_numbers() -> None:
    core = make_driver().core
    with pytest.raises(PromptTooLong) as caught:
        core.submit(make_request(prompt_token_ids=[1] * 64), 0.0)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert caught.value.details == {"num_prompt_tokens": "64", "max_model_len": "64"}


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    driver = make_driver(make_capacity(num_gpu_blocks=3))
    driver.core.submit(make_request(prompt_token_ids=[1] * 12), 0.0)
    with pytest.raises(PromptTooLong) as caught:
        driver.core.submit(make_request(request_id="r2", handle=2, prompt_token_ids=[1] * 13), 0.0)
    assert caught.value.reason == "PROMPT_LARGER_THAN_CACHE"
    assert caught.value.details["num_cache_tokens"] == "12"


SOURCE = CacheGroup(lifetime=CacheLifetime.FIXED, block_tokens=4)


@pytest.mark.parametrize(
    ("num_source_tokens", "message"),
    [
        (9, "the prompt's 5 tokens do not fit the KV cache of 4 beside the 9 tokens of the"),
        (99, "the prompt's 5 tokens do not fit the KV cache of 0 beside the 99 tokens of the"),
    ],
)
def test_a_prompt_that_does_not_fit_beside_its_media_is_refused_with_the_numbers(
    num_source_tokens: int, message: str
) -> None:
    groups = (CacheGroup(block_tokens=4), SOURCE)
    driver = make_driver(make_capacity(num_gpu_blocks=4, cache_groups=groups))
    media = ContextPart(ContextKind.MEDIA, bytes(32), length=num_source_tokens)
    with pytest.raises(PromptTooLong, match=message) as caught:
        driver.core.submit(make_request(prompt_token_ids=[1] * 5, context=(media,)), 0.0)
    assert caught.value.details["num_source_tokens"] == str(num_source_tokens)
    driver.core.submit(make_request(prompt_token_ids=[1] * 5), 0.0)


def test_media_of_unknown_length_are_refused_where_an_encoder_reads_them() -> None:
    salt = ContextPart(ContextKind.SALT, bytes(32))
    media = ContextPart(ContextKind.MEDIA, bytes(32))
    request = make_request(context=(salt, media))
    make_driver().core.submit(request, 0.0)
    driver = make_driver(make_capacity(cache_groups=(CacheGroup(block_tokens=4), SOURCE)))
    with pytest.raises(InvalidArgument, match="number of tokens of the encoder's output") as caught:
        driver.core.submit(request, 0.0)
    assert caught.value.field == "context[1].length"


def test_a_live_request_id_or_handle_is_not_taken_twice() -> None:
    core = SchedulerCore(SMALL_CONFIG)
    core.submit(make_request(num_choices=3), 0.0)
    with pytest.raises(DuplicateRequest):
        core.submit(make_request(handle=9), 0.0)
    with pytest.raises(DuplicateRequest):
        core.submit(make_request(request_id="r2", handle=3), 0.0)
    core.submit(make_request(request_id="r2", handle=3, frontend_id="f1"), 0.0)
    core.cancel("f0", 1, 0.0)
    core.submit(make_request(handle=9), 0.0)


def test_a_full_queue_says_when_to_come_again_but_takes_what_was_accepted_before() -> None:
    core = SchedulerCore(replace(SMALL_CONFIG, max_queue_requests=1, queue_retry_delay_s=2.5))
    core.submit(make_request(), 0.0)
    with pytest.raises(QueueFull) as caught:
        core.submit(make_request(request_id="r2", handle=2), 0.0)
    assert caught.value.retry_delay_s == 2.5
    generated = {0: GeneratedTokens(token_ids=[1])}
    core.submit(make_request(request_id="r2", handle=2, generated=generated), 0.0)
    assert core.pop_outboxes()["f0"].accepted == [1, 2]


def test_request_ids_are_a_tenants_own() -> None:
    core = SchedulerCore(SMALL_CONFIG)
    core.submit(make_request(request_id="r", handle=1, tenant="one"), 0.0)
    core.submit(make_request(request_id="r", handle=2, tenant="two"), 0.0)
    with pytest.raises(DuplicateRequest):
        core.submit(make_request(request_id="r", handle=3, tenant="two"), 0.0)
    with pytest.raises(UnknownRequest):
        core.abort("three", "r", 0.0)
    core.abort("two", "r", 0.0)
    failed = core.pop_outboxes()["f0"].requests_failed
    assert [(handle, type(error)) for handle, error in failed] == [(2, RequestAborted)]
    assert core.snapshot().num_waiting == 1
