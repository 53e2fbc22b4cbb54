"""`Generate` over a real channel, with a core that does what the test says."""

import struct
import time
from typing import Any

import grpc
import pytest

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import (
    bad_field,
    client_of,
    error_info,
    error_of,
    generate_request,
    model_ready,
    read_all,
    read_until_error,
    running_frontend,
    text_of,
    tokens_of,
)
from tests.support.tokenizers import EOS, byte_level, letters, tokens

EOS_ID = byte_level().token_to_id(EOS)
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


async def test_a_text_prompt_streams_text_tokens_usage_and_timings(served: Served) -> None:
    call = served.client.Generate(
        generate_request("hello", max_tokens=9, seed=7, request_id="mine")
    )
    request = await served.core.next_request()
    assert request.prompt == byte_level().encode("hello").ids
    await request.accept()
    first = await call.read()
    assert first.request_id == "mine"
    assert (first.started.seed, first.started.model) == (7, "tiny")
    assert list(first.started.prompt_token_ids) == request.prompt
    ids = tokens("the quick fox")
    for token_id in ids:
        await request.send_tokens([token_id])
    await request.finish_choice()
    await request.finish(cached_tokens=2, timings=pb.Timings(forward_us=30, total_us=50))
    rest = await read_all(call)
    assert text_of(rest) == "the quick fox"
    assert tokens_of(rest) == ids
    last = rest[-1]
    assert last.usage == pb.Usage(
        prompt_tokens=len(request.prompt), cached_tokens=2, completion_tokens=len(ids)
    )
    parts = [value for field, value in last.timings.ListFields() if field.name != "total_us"]
    assert last.timings.total_us == sum(parts) > 0
    assert last.timings.forward_us == 30
    assert not any(response.HasField("usage") for response in rest[:-1])
    assert [d.finish_reason for r in rest for d in r.choices if d.finish_reason] == [LENGTH]


async def test_tokens_that_may_be_held_come_together(served: Served) -> None:
    """Even if the core has reason to send single tokens: other requests' acceptances and ends."""
    ids = tokens("the quick fox")
    held_ms = 300
    call = served.client.Generate(generate_request("hello", max_hold_ms=held_ms))
    request = await served.core.next_request()
    await request.accept()
    assert (await call.read()).HasField("started")
    began = time.monotonic()
    for token_id in ids[:-1]:
        await request.send_tokens([token_id])
    assert tokens_of([await call.read()]) == ids[:-1]
    assert time.monotonic() - began >= held_ms / 1000
    await request.send_tokens(ids[-1:])
    await request.finish_choice()
    await request.finish()
    rest = await read_all(call)
    assert tokens_of(rest) == ids[-1:]
    assert text_of(rest).endswith("fox"[-1])


async def test_an_end_is_not_held(served: Served) -> None:
    call = served.client.Generate(generate_request("hello", max_hold_ms=60_000))
    request = await served.core.next_request()
    await request.complete(tokens("the quick fox"))
    assert text_of(await read_all(call)) == "the quick fox"


async def test_n_choices_come_with_their_index_and_end_each_for_itself(served: Served) -> None:
    call = served.client.Generate(generate_request("hello", n=3))
    request = await served.core.next_request()
    assert request.submit.generation.num_choices == 3
    await request.accept()
    for choice, text in enumerate(["one", "two", "three"]):
        await request.send_tokens(tokens(text), choice)
        await request.finish_choice(choice)
    await request.finish()
    responses = await read_all(call)
    assert [text_of(responses, choice) for choice in range(3)] == ["one", "two", "three"]
    assert responses[-1].usage.completion_tokens == sum(
        len(tokens(text)) for text in ["one", "two", "three"]
    )


async def finished_with(served: Served, ids: list[int], finish: object = None, **fields: object):
    """All responses to a request that got `ids`, and the stops that the core received."""
    call = served.client.Generate(generate_request([5], **fields))
    request = await served.core.next_request()
    await request.accept()
    for token_id in ids:
        await request.send_tokens([token_id])
    if finish is None:
        await served.core.until(lambda: request.attachment.stops)
    else:
        await request.finish_choice(reason=STOP, stop_token_id=finish)
    await request.finish()
    return await read_all(call), request.attachment.stops


def last_delta(responses: list[pb.GenerateResponse]) -> pb.ChoiceDelta:
    return next(d for r in responses for d in r.choices if d.finish_reason)


async def test_a_stop_string_across_tokens_ends_the_choice_and_tells_the_core(
    served: Served,
) -> None:
    ids = letters("helloENDworld")
    responses, stops = await finished_with(served, ids, stop=["EN", "END", "zzz"])
    assert text_of(responses) == "hello"
    assert tokens_of(responses) == letters("helloEN")
    assert last_delta(responses).finish_reason == STOP
    assert last_delta(responses).stop_string == "EN"
    assert [(stop.num_tokens) for stop in stops] == [7]
    assert responses[-1].usage.completion_tokens == 7


async def test_a_stop_string_in_mid_token_cuts_the_text_and_counts_the_token(
    served: Served,
) -> None:
    hello = byte_level().token_to_id("hello")
    assert hello is not None
    responses, _ = await finished_with(served, [hello, *letters("abc")], stop=["ll"])
    assert text_of(responses) == "he"
    assert tokens_of(responses) == [hello]


async def test_stop_strings_are_looked_for_after_min_tokens(served: Served) -> None:
    responses, stops = await finished_with(served, letters("aXbXc"), stop=["X"], min_tokens=2)
    assert text_of(responses) == "aXb"
    assert stops[0].num_tokens == 4


async def test_an_end_of_sequence_token_is_reported_as_a_token_without_its_text(
    served: Served,
) -> None:
    ids = [*letters("ab"), EOS_ID]
    responses, _ = await finished_with(served, ids, EOS_ID, skip_special_tokens=False)
    assert text_of(responses) == "ab"
    assert tokens_of(responses) == ids
    assert last_delta(responses).finish_reason == STOP
    assert last_delta(responses).WhichOneof("stop_reason") is None


async def test_a_stop_token_is_told_and_its_text_shown_on_request(served: Served) -> None:
    ids = letters("abX")
    responses, _ = await finished_with(served, ids, ids[-1], stop_token_ids=[ids[-1]])
    assert text_of(responses) == "ab"
    assert last_delta(responses).stop_token_id == ids[-1]
    responses, _ = await finished_with(
        served, ids, ids[-1], stop_token_ids=[ids[-1]], include_stop_in_output=True
    )
    assert text_of(responses) == "abX"


async def test_a_character_cut_off_at_the_end_is_flushed(served: Served) -> None:
    smile = tokens("😀")
    broken = [byte_level().token_to_id("ð")]
    responses, _ = await finished_with(served, [*smile, *broken], EOS_ID)
    assert text_of(responses) == "😀\ufffd"


def logprobs_entry(handle: int, ids: list[int], values: list[float]) -> scheduler_pb.ChoiceLogprobs:
    return scheduler_pb.ChoiceLogprobs(
        handle=handle,
        token_ids=pack(ids),
        logprobs=struct.pack(f"<{len(values)}f", *values),
        rank=2,
    )


async def test_log_probabilities_come_with_their_tokens_texts_and_sum(served: Served) -> None:
    call = served.client.Generate(generate_request([5, 6, 7], logprobs=2, prompt_logprobs=1))
    request = await served.core.next_request()
    a, b, c = letters("abc")
    update = scheduler_pb.PromptLogprobsUpdate(
        handle=request.handle,
        start=1,
        width=2,
        token_ids=pack([6, a, 7, b]),
        logprobs=struct.pack("<4f", -1, -0.5, -2, -0.25),
        ranks=pack([3, 4]),
    )
    await request.accept()
    await request.send_tokens(
        [a, b],
        logprobs=[
            logprobs_entry(request.handle, [a, b, a], [-0.5, -0.25, -0.5]),
            logprobs_entry(request.handle, [b, c, b], [-1.5, -1.0, -1.5]),
        ],
        prompt_logprobs=[update],
    )
    await request.finish_choice()
    await request.finish()
    responses = await read_all(call)
    (prompt,) = [r.prompt_logprobs for r in responses if r.prompt_logprobs]
    assert [entry.token.token_id for entry in prompt] == [5, 6, 7]
    assert not prompt[0].token.HasField("logprob")
    assert [(entry.token.logprob, entry.token.rank) for entry in prompt[1:]] == [(-1, 3), (-2, 4)]
    assert [(t.token_id, t.logprob, t.rank, t.text) for t in prompt[1].top] == [(a, -0.5, 1, "a")]
    entries = [entry for r in responses for d in r.choices for entry in d.logprobs]
    assert [(e.token.token_id, e.token.logprob, e.token.rank) for e in entries] == [
        (a, -0.5, 2),
        (b, -1.5, 2),
    ]
    assert [[t.text for t in e.top] for e in entries] == [["b", "a"], ["c", "b"]]
    assert last_delta(responses).cumulative_logprob == -2.0


async def test_surplus_tokens_after_a_stop_string_leave_no_log_probabilities(
    served: Served,
) -> None:
    call = served.client.Generate(generate_request([5], logprobs=0, stop=["b"]))
    request = await served.core.next_request()
    ids = letters("abc")
    await request.accept()
    await request.send_tokens(
        ids, logprobs=[logprobs_entry(request.handle, [token_id], [-1.0]) for token_id in ids]
    )
    await served.core.until(lambda: request.attachment.stops)
    await request.finish()
    responses = await read_all(call)
    assert len([e for r in responses for d in r.choices for e in d.logprobs]) == 2
    assert last_delta(responses).cumulative_logprob == -2.0


async def test_a_bad_field_is_refused_before_the_core_hears_of_it(served: Served) -> None:
    error = await error_of(served.client.Generate(generate_request("a", temperature=-1)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_field(error) == "sampling_params.temperature"
    assert error_info(error).reason == "INVALID_FIELD"
    await model_ready(served.frontend)
    assert not (await served.core.attachment()).requests


async def test_a_live_request_id_is_refused_and_a_dead_one_free(served: Served) -> None:
    first = served.client.Generate(generate_request("a", request_id="same"))
    request = await served.core.next_request()
    error = await error_of(served.client.Generate(generate_request("a", request_id="same")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    await request.complete(tokens("x"))
    await read_all(first)
    again = served.client.Generate(generate_request("a", request_id="same"))
    await (await served.core.next_request()).complete(tokens("y"))
    assert text_of(await read_all(again)) == "y"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (grpc.StatusCode.FAILED_PRECONDITION, "PROMPT_TOO_LONG"),
        (grpc.StatusCode.INTERNAL, "GENERATION_FAILED"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    ],
)
async def test_the_cores_refusal_reaches_the_client_as_it_is(
    served: Served, code: grpc.StatusCode, reason: str
) -> None:
    call = served.client.Generate(generate_request("a"))
    await (await served.core.next_request()).fail(code, reason, "so it is")
    error = await error_of(call)
    assert (error.code(), error.details()) == (code, "so it is")
    assert error_info(error).reason == reason


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"choice": {"choices": ["a"]}, "bad_words": ["a"]}, "choice and bad_words"),
        ({"regex": "ab", "stop_token_ids": [97]}, "regex and stop_token_ids"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [5], "min_tokens": 2}, "allowed_token_ids and min_tokens"),
    ],
)
async def test_an_answer_without_a_possible_token_is_the_requests_fault(
    sampling: dict[str, Any], named: str
) -> None:
    async with (
        FakeCore(models=[model_info(structured_output=True)]) as core,
        running_frontend(core.address) as frontend,
        client_of(frontend) as client,
    ):
        call = client.Generate(generate_request("a", **sampling))
        request = await core.next_request()
        await request.fail(grpc.StatusCode.INVALID_ARGUMENT, "NO_CANDIDATES", "nothing")
        error = await error_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"no token can come next: all are excluded by {named}"


async def test_tokens_before_a_failure_are_delivered_before_its_error(served: Served) -> None:
    call = served.client.Generate(generate_request("a"))
    request = await served.core.next_request()
    await request.accept()
    await request.send_tokens(tokens("half"))
    await request.fail(grpc.StatusCode.INTERNAL, "GENERATION_FAILED")
    received, error = await read_until_error(call)
    assert text_of(received) == "half"
    assert error.code() is grpc.StatusCode.INTERNAL


async def test_a_request_the_core_ends_with_choices_open_is_an_error(served: Served) -> None:
    call = served.client.Generate(generate_request("a", n=2))
    request = await served.core.next_request()
    await request.accept()
    await request.finish_choice(0)
    await request.finish()
    assert (await error_of(call)).code() is grpc.StatusCode.INTERNAL
