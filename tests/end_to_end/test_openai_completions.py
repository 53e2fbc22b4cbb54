"""OpenAI's own client on `/v1/completions` of real services with the embedded model."""

from functools import partial

import openai
import pytest

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.requests import generate, request_for

SUM = "27 + 45 ="
TEXT = "the cat sat on the mat and looked at the moon"


def test_a_completion_is_the_models_own(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="embedded", prompt=SUM, temperature=0, max_tokens=8, stop="\n"
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (" 72", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "embedded"


def test_the_same_seed_gives_the_same_text_streamed_or_whole(openai_client: openai.OpenAI) -> None:
    wish = {"model": "embedded", "prompt": "Once upon", "seed": 5, "max_tokens": 40, "n": 3}
    whole = openai_client.completions.create(**wish)
    texts = dict.fromkeys(range(3), "")
    ends = {}
    chunks = openai_client.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    )
    usages = []
    for chunk in chunks:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert [choice.finish_reason for choice in whole.choices] == [ends[i] for i in range(3)]
    assert len(set(texts.values())) > 1
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] is not None
    assert whole.usage is not None
    assert usages[-1].completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_are_those_of_prompt_logprobs_over_grpc(
    openai_client: openai.OpenAI, stub: InferenceServiceStub, max_tokens: int
) -> None:
    """As lm-eval asks: batches of token ids, echoed with log probabilities."""
    tokenized = [
        list(generate(stub, request_for(text, max_tokens=1)).started.prompt_token_ids)
        for text in (TEXT, SUM + " 72", "Once upon a time")
    ]
    answer = openai_client.completions.create(
        model="embedded",
        prompt=tokenized,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    for ids, choice in zip(tokenized, answer.choices, strict=True):
        told = choice.logprobs
        assert told is not None
        assert len(told.tokens or []) == len(ids) + max_tokens
        expected = generate(stub, request_for(ids, max_tokens=1, prompt_logprobs=1))
        wanted = [position.token.logprob for position in expected.prompt_logprobs[1:]]
        found = told.token_logprobs[: len(ids)]  # type: ignore[index]
        assert found[0] is None
        assert found[1:] == wanted
        best = [max(top, key=top.get) for top in told.top_logprobs[1 : len(ids)]]  # type: ignore
        assert best == [position.top[0].text for position in expected.prompt_logprobs[1:]]


def test_an_echo_comes_first_streamed_or_whole(openai_client: openai.OpenAI) -> None:
    wish = {"model": "embedded", "prompt": SUM, "temperature": 0, "max_tokens": 4, "echo": True}
    whole = openai_client.completions.create(**wish, logprobs=2).choices[0]
    assert whole.text.startswith(f"{SUM} 72")
    assert whole.logprobs is not None
    begin, *offsets = whole.logprobs.text_offset or []
    _bos, *tokens = whole.logprobs.tokens or []
    assert begin == 0
    for token, offset in zip(tokens, offsets, strict=True):
        assert whole.text[offset:].startswith(token)
    chunks = list(openai_client.completions.create(**wish, logprobs=2, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.text
    told = [c.logprobs.token_logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    assert [value for part in told for value in part or []] == whole.logprobs.token_logprobs


def test_errors_are_those_that_the_client_knows(openai_client: openai.OpenAI) -> None:
    create = openai_client.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as range_error:
        create(model="embedded", prompt="a", top_p=2)
    assert range_error.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as too_long:
        create(model="embedded", prompt=[5] * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: the prompt has 2000 tokens"):
        create(model="embedded", prompt=[[5], [5] * 2000])
    with pytest.raises(openai.BadRequestError) as misspelt:
        create(model="embedded", prompt="a", extra_body={"topp": 1})
    assert misspelt.value.param == "topp"
    with pytest.raises(openai.BadRequestError) as out_of_vocabulary:
        create(model="embedded", prompt=[[5], [5, 5000]])
    assert out_of_vocabulary.value.param == "prompt[1][1]"


def test_a_request_that_excludes_every_token_is_told_by_what(openai_client: openai.OpenAI) -> None:
    asked = {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}
    told = "excluded by choice and bad_words"
    complete = partial(openai_client.completions.create, model="embedded", prompt="x")
    with pytest.raises(openai.BadRequestError, match=told) as refusal:
        complete(extra_body=asked)
    assert refusal.value.code == "no_candidates"
    with pytest.raises(openai.APIError, match=told):
        list(complete(stream=True, extra_body=asked))


def test_models_are_listed(openai_client: openai.OpenAI) -> None:
    (model,) = openai_client.models.list().data
    assert model.id == "embedded"
    assert openai_client.models.retrieve("embedded") == model
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("other")
