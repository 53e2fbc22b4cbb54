"""`/v1/completions` between a client and a core that a test controls."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from pagewire.columns import pack, pack_floats
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from tests.support.fake_core import FakeCore
from tests.support.frontends import eventually
from tests.support.http_frontends import HttpServed, http_served, none_open
from tests.support.tokenizers import model_files, sentencepiece, tokens

PATH = "/v1/completions"
WISH = {"prompt": "hello", "max_tokens": 50}


def post(
    served: HttpServed, wish: dict[str, Any], **headers: str
) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(served.client.post(PATH, json=wish, headers=headers))


def events(body: str) -> list[Any]:
    """What the server-sent events of a body hold."""
    return [
        json.loads(line.removeprefix("data: ")) if line != "data: [DONE]" else "[DONE]"
        for line in body.split("\n\n")
        if line
    ]


async def test_a_request_goes_to_the_core_as_one_of_grpc_does(served: HttpServed) -> None:
    wish = WISH | {"temperature": 0, "seed": -2, "logit_bias": {"7": 3}, "top_k": -1, "priority": 4}
    wish |= {"num_speculative_tokens": 0}
    answer = post(served, wish | {"min_p": 0.25, "stop_token_ids": [9], "ignore_eos": True})
    request = await served.core.next_request()
    sampling = request.submit.generation.sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p) == (2**64 - 2, 0, 0.25)
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(7, 3)]
    assert request.submit.priority == 4
    assert request.submit.generation.HasField("num_speculative_tokens")
    assert request.submit.generation.num_speculative_tokens == 0
    assert request.submit.generation.max_tokens == 50
    assert request.submit.generation.max_hold_ms == 1000
    await request.complete(tokens("world"))
    body = (await answer).json()
    assert body["choices"][0]["text"] == "world"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_drafts_are_in_the_usage_if_there_were_any(served: HttpServed) -> None:
    for drafts in (9, 0):
        answer = post(served, WISH | {"n": 2, "prompt": ["hello", "world"]})
        for accepted in (1, 3):
            request = await served.core.next_request()
            await request.accept()
            for choice in range(2):
                await request.send_tokens(tokens("hello world"), choice=choice)
                await request.finish_choice(choice=choice)
            timings = pb.Timings(num_drafts=drafts, num_accepted_drafts=accepted if drafts else 0)
            await request.finish(timings=timings)
        usage = (await answer).json()["usage"]
        details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 14}
        assert usage.get("completion_tokens_details") == (details if drafts else None)
        assert usage["completion_tokens"] == 4 * len(tokens("hello world"))


async def test_a_stream_tells_what_there_is_and_ends_with_done(served: HttpServed) -> None:
    answer = post(served, WISH | {"stream": True}, **{"X-Request-Id": "mine-1"})
    await (await served.core.next_request()).complete(tokens("hello world"))
    response = await answer
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine-1"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert all(chunk["id"] == "cmpl-mine-1" and "usage" not in chunk for chunk in chunks)


async def test_a_text_goes_on_after_its_prompt_with_the_space_that_its_first_token_has() -> None:
    words = [sentencepiece().token_to_id(word) for word in ("▁hello", "▁a")]
    files = {"tiny": model_files(sentencepiece())}
    async with http_served(FakeCore(files=files)) as served:
        for wish in (WISH, WISH | {"prompt": words}):
            answer = post(served, wish | {"logprobs": 0})
            request = await served.core.next_request()
            entries = [
                scheduler_pb.ChoiceLogprobs(
                    handle=request.handle, token_ids=pack([word]), logprobs=pack_floats([-1.0])
                )
                for word in words
            ]
            await request.accept()
            await request.send_tokens(words, logprobs=entries)
            await request.finish_choice()
            await request.finish()
            [choice] = (await answer).json()["choices"]
            assert choice["text"] == " hello a"
            assert choice["logprobs"]["text_offset"] == [0, len(" hello")]


async def test_a_second_live_request_of_an_id_is_refused(served: HttpServed) -> None:
    first = post(served, WISH, **{"X-Request-Id": "same"})
    request = await served.core.next_request()
    refused = await post(served, WISH, **{"X-Request-Id": "same"})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "duplicate_request"
    await request.complete(tokens("world"))
    assert (await first).status_code == 200


async def test_a_malformed_request_id_is_refused(served: HttpServed) -> None:
    refused = await post(served, WISH, **{"X-Request-Id": "a b"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Request-Id"


async def test_a_token_id_of_thousands_of_digits_is_refused(served: HttpServed) -> None:
    wish = {"prompt": "hello", "logit_bias": {"9" * 5000: 1}}
    refused = await served.client.post("/v1/completions", json=wish)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")


async def test_a_client_that_does_not_read_and_then_goes_frees_its_request(
    served: HttpServed,
) -> None:
    """Its socket and our buffers are full then, and a write waits."""
    assert served.frontend.http is not None
    host, _, port = served.frontend.http.address.rpartition(":")
    wish = {"prompt": "hello", "max_tokens": 250, "n": 100, "stream": True, "logprobs": 20}
    body = json.dumps(wish).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        request = await served.core.next_request()
        await request.accept()
        flood = tokens("hello world ") * 15
        for choice in range(100):
            await request.send_tokens(flood, choice)
    await request.cancelled()
    await none_open(served.frontend)


async def test_an_error_before_the_first_byte_has_its_code(served: HttpServed) -> None:
    answer = post(served, WISH | {"stream": True}, **{"X-Request-Id": "mine-2"})
    request = await served.core.next_request()
    await request.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_delay_us=2_500_000)
    refused = await answer
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3"
    assert refused.headers["x-request-id"] == "mine-2"
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_a_stream_that_is_cut_ends_with_its_error_and_not_with_done(
    served: HttpServed,
) -> None:
    answer = post(served, WISH | {"stream": True})
    request = await served.core.next_request()
    await request.accept()
    await request.send_tokens(tokens("hello"))
    await request.fail(grpc.StatusCode.INTERNAL, "GENERATION_FAILED", "NaN")
    *_, last = events((await answer).text)
    assert last["error"]["code"] == "generation_failed"


async def test_one_prompts_error_ends_the_others(served: HttpServed) -> None:
    answer = post(served, WISH | {"prompt": ["hello", "world"]})
    requests = [await served.core.next_request() for _ in range(2)]
    await requests[0].accept()
    await requests[1].fail(grpc.StatusCode.INTERNAL, "GENERATION_FAILED", "NaN")
    assert (await answer).status_code == 500
    await requests[0].cancelled()


async def test_a_call_opens_at_most_its_share_of_the_frontend() -> None:
    async with http_served(max_concurrent_requests=4) as served:
        refused = await post(served, WISH | {"prompt": ["hello"] * 3})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
        assert "at most 2 prompts in one call, got 3" in refused.json()["error"]["message"]
        calls = [post(served, WISH | {"prompt": ["hello"] * 2}) for _ in range(2)]
        requests = [await served.core.next_request() for _ in range(4)]
        refused = await post(served, WISH)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        for request in requests:
            await request.complete(tokens("world"))
        assert [(await call).status_code for call in calls] == [200, 200]


@pytest.mark.parametrize(
    ("code", "reason", "http_code"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504),
        (grpc.StatusCode.INTERNAL, "GENERATION_FAILED", 500),
        (grpc.StatusCode.INTERNAL, "KV_CACHE_TOO_SMALL", 500),
        (grpc.StatusCode.INTERNAL, "WORKERS_LOST", 500),
    ],
)
async def test_a_client_is_not_to_repeat_what_would_fail_again(
    served: HttpServed, code: grpc.StatusCode, reason: str, http_code: int
) -> None:
    answer = post(served, WISH)
    await (await served.core.next_request()).fail(code, reason)
    failed = await answer
    assert (failed.status_code, failed.headers["x-should-retry"]) == (http_code, "false")
    assert failed.json()["error"]["code"] == reason.lower()


async def test_what_does_not_finish_in_time_ends_as_an_error() -> None:
    async with http_served(grace_period_s=0) as served:
        answer = post(served, WISH | {"stream": True})
        request = await served.core.next_request()
        await request.accept()
        await eventually(lambda: answer.done() or len(served.frontend.requests) == 1)
        await served.frontend.stop()
        body = (await answer).text
        assert events(body)[-1]["error"]["code"] == "shutting_down"


async def test_a_body_that_turns_out_too_long_is_refused(served: HttpServed) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    answer = await served.client.post(PATH, content=pieces())
    assert answer.status_code == 413
