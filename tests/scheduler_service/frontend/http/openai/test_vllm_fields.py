"""What vLLM's interface has beyond OpenAI's, between a client and a core that a test controls."""

import asyncio
import json
from collections.abc import Sequence
from struct import pack, unpack
from typing import Any

import httpx
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.inert_fields import NEUTRAL
from tests.support.fake_core import FakeRequest
from tests.support.http_frontends import HttpServed
from tests.support.tokenizers import byte_level, tokens

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WISH = {"prompt": "hello", "max_tokens": 50}
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
BOTH = [(COMPLETIONS, WISH), (CHAT, ASK)]


def chunks_of(answer: httpx.Response) -> list[Any]:
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def submitted(
    served: HttpServed, path: str, wish: dict[str, Any], output: Sequence[int] = (5,)
) -> tuple[FakeRequest, httpx.Response]:
    """The request as the core got it, and the answer after it has sent `output` token by token."""
    answer = asyncio.create_task(served.client.post(path, json=wish))
    request = await served.core.next_request()
    await request.accept()
    for token_id in output:
        await request.send_tokens([token_id])
    await request.finish_choice()
    await request.finish()
    response = await answer
    assert response.status_code == 200, response.text
    return request, response


@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_every_chunk_tells_the_usage_so_far(
    served: HttpServed, path: str, wish: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request, answer = await submitted(
        served, path, wish | {"stream": True, "stream_options": options}, tokens("hello world")
    )
    chunks = chunks_of(answer)
    usages = [chunk["usage"] for chunk in chunks]
    assert {usage["prompt_tokens"] for usage in usages} == {len(request.prompt)}
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == len(tokens("hello world"))
    assert chunks[-1]["choices"] == []


async def test_a_completion_tells_token_ids(served: HttpServed) -> None:
    output = tokens("hello world")
    request, answer = await submitted(
        served, COMPLETIONS, WISH | {"return_token_ids": True}, output
    )
    (choice,) = answer.json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (request.prompt, output)


async def test_a_streamed_completion_tells_token_ids_as_they_come(served: HttpServed) -> None:
    output = tokens("hello world")
    wish = WISH | {"return_token_ids": True, "stream": True}
    request, answer = await submitted(served, COMPLETIONS, wish, output)
    choices = [choice for chunk in chunks_of(answer) for choice in chunk["choices"]]
    assert [choice["prompt_token_ids"] for choice in choices[:1]] == [request.prompt]
    assert {choice["prompt_token_ids"] is None for choice in choices[1:]} == {True}
    assert [token for choice in choices for token in choice["token_ids"] or []] == output


async def test_a_chat_tells_token_ids(served: HttpServed) -> None:
    output = tokens("hello world")
    request, answer = await submitted(served, CHAT, ASK | {"return_token_ids": True}, output)
    body = answer.json()
    assert body["prompt_token_ids"] == request.prompt
    assert body["choices"][0]["token_ids"] == output
    wish = ASK | {"return_token_ids": True, "stream": True}
    request, answer = await submitted(served, CHAT, wish, output)
    chunks = chunks_of(answer)
    assert chunks[0]["prompt_token_ids"] == request.prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    told = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [token for part in told for token in part] == output


async def test_without_the_wish_no_token_ids_are_told(served: HttpServed) -> None:
    for path, wish in BOTH:
        _, answer = await submitted(served, path, wish)
        assert "token_ids" not in answer.text


@pytest.mark.parametrize("adds", [True, False])
async def test_special_tokens_may_be_in_the_text_already(served: HttpServed, adds: bool) -> None:
    request, _ = await submitted(served, COMPLETIONS, WISH | {"add_special_tokens": adds})
    expected = byte_level().encode("hello", add_special_tokens=adds).ids
    assert request.prompt == expected


async def test_of_a_long_prompt_the_end_is_taken_and_echoed(served: HttpServed) -> None:
    wish = WISH | {"prompt": "one two three", "truncate_prompt_tokens": 2, "echo": True}
    request, answer = await submitted(served, COMPLETIONS, wish, tokens("!"))
    assert request.prompt == tokens("one two three")[-2:]
    kept = byte_level().decode(request.prompt)
    assert answer.json()["choices"][0]["text"] == kept + "!"


@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_as_much_of_a_prompt_as_fits(
    served: HttpServed, path: str, wish: dict[str, Any]
) -> None:
    long = "hello " * 400
    longer = {"prompt": long} if "prompt" in wish else {}
    if not longer:
        longer = {"messages": [{"role": "user", "content": long}]}
    request, _ = await submitted(served, path, wish | longer | {"truncate_prompt_tokens": -1})
    assert len(request.prompt) == 256 - 50


@pytest.mark.parametrize(
    ("wish", "width", "n"),
    [({}, 1, 1), ({"n": 3}, 3, 3), ({"n": 2, "best_of": 5}, 5, 2)],
)
async def test_beam_search(served: HttpServed, wish: dict[str, Any], width: int, n: int) -> None:
    beams = {"use_beam_search": True, "length_penalty": 2.0, "max_tokens": 4}
    answer = asyncio.create_task(served.client.post(COMPLETIONS, json=WISH | beams | wish))
    request = await served.core.next_request()
    assert request.submit.generation.num_choices == n
    if width > 1:
        assert request.submit.generation.beam_search.width == width
        assert request.submit.generation.beam_search.length_penalty == 2
    else:
        assert not request.submit.generation.HasField("beam_search")
    answer.cancel()
    await request.cancelled()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("asked", "taken"), [(1e-6, 0.01), (0.005, 0.01), (0, 0), (0.02, 0.02)])
async def test_a_temperature_that_is_too_low_is_the_lowest(
    served: HttpServed, path: str, asked: float, taken: float
) -> None:
    request, _ = await submitted(served, path, dict(BOTH)[path] | {"temperature": asked})
    assert request.submit.generation.sampling.temperature == unpack("f", pack("f", taken))[0]


async def test_a_request_may_be_named_in_the_body(served: HttpServed) -> None:
    _, answer = await submitted(served, COMPLETIONS, WISH | {"request_id": "mine-1"})
    assert answer.json()["id"] == "cmpl-mine-1"
    assert answer.headers["x-request-id"] == "mine-1"


async def test_fields_at_values_that_ask_for_nothing_are_taken(served: HttpServed) -> None:
    """Clients send what they have, whether or not it was set."""
    both = {
        "spaces_between_special_tokens": True,
        "truncation_side": "left",
        "length_penalty": 1.0,
        "use_beam_search": False,
    }
    await submitted(served, COMPLETIONS, WISH | both | {"suffix": None, "add_special_tokens": True})
    chat = {
        "functions": None,
        "function_call": None,
        "audio": None,
        "prediction": None,
        "web_search_options": None,
        "top_logprobs": 0,
        "echo": False,
        "add_special_tokens": False,
        "include_reasoning": True,
    }
    await submitted(served, CHAT, ASK | both | chat)


@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_values_that_ask_for_nothing_are_absent_fields(
    served: HttpServed, path: str, wish: dict[str, Any]
) -> None:
    asked = {name: value for name, values in NEUTRAL.items() for value in values}
    await submitted(served, path, wish | asked | {"suffix": ""})


@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_whole_numbers_may_be_written_with_a_fraction_of_zero(
    served: HttpServed, path: str, wish: dict[str, Any]
) -> None:
    asked = wish | {"max_tokens": 7.0, "top_k": 3.0, "seed": 2.0, "temperature": 1.0}
    request, _ = await submitted(served, path, asked)
    generation = request.submit.generation
    assert (generation.max_tokens, generation.sampling.top_k, generation.sampling.seed) == (7, 3, 2)


@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_minus_one_is_as_many_tokens_as_fit_and_any_seed(
    served: HttpServed, path: str, wish: dict[str, Any]
) -> None:
    seeds = set()
    for _ in range(2):
        asked = wish | {"max_tokens": -1, "seed": -1}
        request, _ = await submitted(served, path, asked)
        assert request.submit.generation.max_tokens == 256 - len(request.prompt)
        seeds.add(request.submit.generation.sampling.seed)
    assert len(seeds) == 2, "drawn for each"
    request, _ = await submitted(served, path, wish | {"seed": -2})
    assert request.submit.generation.sampling.seed == 2**64 - 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_a_stop_string_ends_an_answer_wherever_tokens_part(
    served: HttpServed, path: str, wish: dict[str, Any], stream: bool
) -> None:
    output = [token for letter in "hello world" for token in tokens(letter)]
    wish = wish | {"stop": ["lo wor"], "stream": stream}
    answer = asyncio.create_task(served.client.post(path, json=wish))
    request = await served.core.next_request()
    await request.accept()
    for token_id in output:
        await request.send_tokens([token_id])
    await served.core.until(lambda: request.attachment.stops)
    await request.finish()
    assert _text_and_ends(await answer, stream=stream) == ("hel", [("stop", "lo wor")])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_an_answer_may_be_empty(
    served: HttpServed, path: str, wish: dict[str, Any], stream: bool
) -> None:
    answer = asyncio.create_task(served.client.post(path, json=wish | {"stream": stream}))
    request = await served.core.next_request()
    await request.accept()
    await request.finish_choice(reason=pb.FINISH_REASON_STOP)
    await request.finish()
    assert _text_and_ends(await answer, stream=stream) == ("", [("stop", None)])


def _text_and_ends(answer: httpx.Response, *, stream: bool) -> tuple[str, list[Any]]:
    """All text, and each finish reason with its stop reason."""
    bodies = chunks_of(answer) if stream else [answer.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    text = ""
    for choice in choices:
        message = choice.get("delta") or choice.get("message") or {}
        text += choice.get("text", "") + (message.get("content") or "")
    ended = [choice for choice in choices if choice["finish_reason"]]
    return text, [(choice["finish_reason"], choice["stop_reason"]) for choice in ended]


@pytest.mark.parametrize(("path", "wish"), BOTH)
async def test_null_means_absent_for_any_field(
    served: HttpServed, path: str, wish: dict[str, Any]
) -> None:
    absent = (
        "cache_salt",
        "guided_json",
        "mm_processor_kwargs",
        "chat_template",
        "suffix",
        "temperature",
    )
    defaults = {
        "return_token_offsets": False,
        "routed_experts_prompt_start": 0,
        "mm_payload": "tensors",
    }
    await submitted(served, path, wish | dict.fromkeys(absent) | defaults)
