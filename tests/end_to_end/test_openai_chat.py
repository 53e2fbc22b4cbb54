"""OpenAI's own client on `/v1/chat/completions` of real services with the embedded model."""

import openai
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.requests import generate

ASK = [{"role": "user", "content": "What is 27 + 45?"}]
STORY = [{"role": "user", "content": "Write a story about a cat."}]


def test_a_chat_is_answered(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(model="embedded", messages=ASK, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == "27 + 45 = 72."
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be brief."}, *ASK],
        [{"role": "developer", "content": "Be brief."}, *ASK],
        [{"role": "user", "content": [{"type": "text", "text": "What is 27 + 45?"}]}],
        [*ASK, {"role": "assistant", "content": "27 + 45 = 72.", "refusal": None}, *ASK],
    ],
)
def test_conversations_of_all_kinds(openai_client: openai.OpenAI, messages: list) -> None:
    answer = openai_client.chat.completions.create(
        model="embedded", messages=messages, temperature=0
    )
    assert answer.choices[0].message.content == "27 + 45 = 72."


def test_a_stream_adds_up_to_the_whole(openai_client: openai.OpenAI) -> None:
    wish = {"model": "embedded", "messages": STORY, "seed": 3, "max_completion_tokens": 60, "n": 2}
    whole = openai_client.chat.completions.create(**wish)
    texts, ends, roles = ["", ""], ["", ""], ["", ""]
    usage = None
    for chunk in openai_client.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            ends[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert usage == whole.usage


def test_log_probabilities_are_those_over_grpc(
    openai_client: openai.OpenAI, stub: InferenceServiceStub
) -> None:
    answer = openai_client.chat.completions.create(
        model="embedded", messages=ASK, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4
    )
    told = answer.choices[0].logprobs
    assert told is not None
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content=ASK[0]["content"])
    request.sampling_params.temperature = 0
    request.sampling_params.logprobs = 3
    request.sampling_params.max_tokens = 4
    expected = generate(stub, request).choices[0].logprobs
    assert [entry.logprob for entry in told.content or []] == [p.token.logprob for p in expected]
    for entry, position in zip(told.content or [], expected, strict=True):
        assert [top.token for top in entry.top_logprobs] == [top.text for top in position.top]
        assert bytes(entry.bytes or []).decode() == entry.token


def test_a_stream_tells_the_prompts_log_probabilities_once(openai_client: openai.OpenAI) -> None:
    wish = {"model": "embedded", "messages": ASK, "max_tokens": 4, "seed": 1}
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    whole = openai_client.chat.completions.create(**wish, extra_body=extra).model_dump()
    chunks = openai_client.chat.completions.create(**wish, extra_body=extra, stream=True)
    told = [chunk.model_dump() for chunk in chunks]
    for field in ("prompt_logprobs", "prompt_token_ids"):
        (found,) = [chunk[field] for chunk in told if field in chunk]
        assert found == whole[field]
        assert len(found) == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_timings_are_told_if_they_are_asked_for(
    openai_client: openai.OpenAI, options: dict | None
) -> None:
    wish = {"model": "embedded", "messages": ASK, "max_tokens": 4}
    extra = {"return_timings": True}
    plain = openai_client.chat.completions.create(**wish).model_dump()
    assert "timings" not in plain
    whole = openai_client.chat.completions.create(**wish, extra_body=extra).model_dump()
    *others, last = openai_client.chat.completions.create(
        **wish, extra_body=extra, stream=True, stream_options=options
    )
    assert not any("timings" in chunk.model_dump() for chunk in others)
    assert (last.usage is not None) == (options is not None)
    for (told,) in (whole["timings"], last.model_dump()["timings"]):
        assert told["total_us"] >= told["forward_us"] > 0


def test_an_unfinished_answer_is_continued(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="embedded",
        messages=[*ASK, {"role": "assistant", "content": "27 + 45 ="}],
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert answer.choices[0].message.content == " 72."
