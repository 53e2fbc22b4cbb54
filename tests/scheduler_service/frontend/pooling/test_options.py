"""What a call may ask of a model, how its texts are prepared, and what is refused."""

from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import pooling_pb2
from tests.support.fake_core import model_info
from tests.support.frontends import bad_field, error_info, error_of
from tests.support.pooling import (
    answering,
    errors_of,
    pooling_model,
    responses_of,
    serving,
    texts,
    vectors_of,
)
from tests.support.tokenizers import BOS, EOS, byte_level, model_files

PROMPTS = {
    "prompts": [
        pooling_pb2.NamedPrompt(name="query", text="hello "),
        pooling_pb2.NamedPrompt(name="document", text="stop "),
    ],
    "default_prompt_name": "document",
}
RERANKER = {
    "vector_size": 0,
    "labels": ["score"],
    "scores_pairs": True,
    "classifier_type": pooling_pb2.POOLING_TYPE_CLS,
    "label_activation": pooling_pb2.LABEL_ACTIVATION_SIGMOID,
}


def pairing() -> Tokenizer:
    """A tokenizer that puts special tokens around texts and pairs, as BERT's does."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    ids = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", pair=f"{BOS} $A {EOS} $B:1 {EOS}:1", special_tokens=ids
    )
    return tokenizer


FILES = {"embedder": model_files(pairing())}


async def prompts_of(message: Any, method: str = "Embed", **pooling: Any) -> list[Any]:
    """The texts that the core gets of a call, in order."""
    async with serving(pooling_model(**pooling), files=FILES) as (core, _, client):
        async with answering(core, lambda request: request.pool(1, 2, 3)):
            await responses_of(getattr(client, method)(), message)
        return core.requests


def encoded(text: str) -> list[int]:
    return list(pairing().encode(text).ids)


@pytest.mark.parametrize(
    ("embed", "prefix"),
    [
        ({}, "stop "),
        ({"prompt_name": "query"}, "hello "),
        ({"prompt_name": ""}, ""),
        ({"prompt": "quick "}, "quick "),
        ({"prompt": ""}, ""),
    ],
)
async def test_a_prompt_precedes_texts(embed: dict[str, str], prefix: str) -> None:
    request = pb.EmbedRequest(inputs=texts("fox"), embed=pb.EmbedOptions(**embed))
    (sent,) = await prompts_of(request, **PROMPTS)
    assert sent.prompt == encoded(prefix + "fox")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, [*encoded("0 1 2 3")[:3], encoded("")[-1]]),
        (
            {"truncate_prompt_tokens": 4, "truncation_side": pb.TRUNCATION_SIDE_LEFT},
            [encoded("")[0], *encoded("0 1 2 3")[-3:]],
        ),
        ({"add_special_tokens": False}, encoded("0 1 2 3")[1:-1]),
        (
            {"add_special_tokens": False, "truncate_prompt_tokens": 2},
            encoded("0 1 2 3")[1:3],
        ),
        ({"truncate_prompt_tokens": -1}, encoded("0 1 2 3")),
    ],
)
async def test_a_text_is_cut_within_its_special_tokens(
    options: dict[str, Any], expected: list[int]
) -> None:
    request = pb.EmbedRequest(inputs=texts("0 1 2 3"), options=pb.PoolingOptions(**options))
    assert [sent.prompt for sent in await prompts_of(request)] == [expected]


@pytest.mark.parametrize("side", [pb.TRUNCATION_SIDE_LEFT, pb.TRUNCATION_SIDE_RIGHT])
async def test_a_very_long_text_is_cut_as_if_it_were_encoded_as_a_whole(side: Any) -> None:
    text = " ".join(map(str, range(40_000)))
    options = pb.PoolingOptions(truncate_prompt_tokens=-1, truncation_side=side)
    (sent,) = await prompts_of(pb.EmbedRequest(inputs=texts(text), options=options))
    inner = encoded(text)[1:-1]
    kept = inner[-254:] if side == pb.TRUNCATION_SIDE_LEFT else inner[:254]
    assert sent.prompt == [encoded("")[0], *kept, encoded("")[-1]]


async def test_the_texts_of_a_pair_are_read_together_and_the_longer_is_cut_first() -> None:
    options = pb.PoolingOptions(truncate_prompt_tokens=8)
    pair = pb.TextPair(first="0", second="0 1 2 3 0 1 2 3")
    request = pb.ScoreRequest(pairs=[pair], options=options)
    (sent,) = await prompts_of(request, "Score", **RERANKER)
    bos, zero, eos = encoded("0")
    assert sent.prompt == [bos, zero, eos, *encoded(pair.second)[1:5], eos]
    assert sent.submit.pooling.second_text_start == 3
    assert sent.submit.pooling.head == pooling_pb2.POOLING_HEAD_CLASSIFIER
    assert sent.submit.pooling.type == pooling_pb2.POOLING_TYPE_CLS


async def test_a_template_makes_one_text_of_a_pair() -> None:
    template = "{{ instruction | default('judge') }}: {{ query }} {{ document }}</s>"
    request = pb.RankRequest(query="0", documents=["1"], score=pb.ScoreOptions(instruction="see"))
    (sent,) = await prompts_of(request, "Rank", pair_template=template, **RERANKER)
    assert sent.prompt == pairing().encode("see: 0 1</s>", add_special_tokens=False).ids
    assert sent.submit.pooling.second_text_start == 0


@pytest.mark.parametrize(
    ("method", "request_", "pooling", "field", "expected"),
    [
        ("Embed", {"embed": {"dimensions": 2}}, {}, "embed.dimensions", "expected 3: the model"),
        (
            "Embed",
            {"embed": {"dimensions": 1}},
            {"matryoshka_dimensions": [2]},
            "embed.dimensions",
            "expected one of 2, 3, got 1",
        ),
        (
            "Embed",
            {"embed": {"dimensions": 4}},
            {"matryoshka_dimensions": [0]},
            "embed.dimensions",
            "expected 1 to 3, got 4",
        ),
        (
            "Embed",
            {"embed": {"type": pooling_pb2.POOLING_TYPE_MEAN}},
            {},
            "embed.type",
            "expected POOLING_TYPE_LAST and POOLING_TYPE_ALL, which the model has, got "
            "POOLING_TYPE_MEAN",
        ),
        (
            "Embed",
            {"embed": {"prompt_name": "code"}},
            PROMPTS,
            "embed.prompt_name",
            "expected one of the model's prompts (document, query), got 'code'",
        ),
        (
            "Embed",
            {"embed": {"prompt": "a", "prompt_name": "query"}},
            PROMPTS,
            "embed.prompt",
            "excludes prompt_name",
        ),
        (
            "Embed",
            {"options": {"truncate_prompt_tokens": 0}},
            {},
            "options.truncate_prompt_tokens",
            "expected -1, or 1 to the model's 256, got 0",
        ),
        (
            "Embed",
            {"options": {"truncate_prompt_tokens": 65}},
            {"max_text_tokens": 64},
            "options.truncate_prompt_tokens",
            "expected -1, or 1 to the model's 64, got 65",
        ),
        (
            "Embed",
            {"options": {"truncate_prompt_tokens": -2}},
            {},
            "options.truncate_prompt_tokens",
            "-1",
        ),
        ("Embed", {"inputs": []}, {}, "inputs", "expected at least one, got none"),
        (
            "Score",
            {"score": {"apply_activation": True}},
            {},
            "score.apply_activation",
            "expected none: the model makes vectors",
        ),
        (
            "Score",
            {"score": {"instruction": "see"}},
            RERANKER,
            "score.instruction",
            "expected none: the model has no place for it",
        ),
        ("Rank", {"documents": ["a"]}, {}, "query", "expected a text that is not empty"),
        ("Rank", {"query": "a", "documents": ["b"], "top_n": 0}, {}, "top_n", "1"),
    ],
)
async def test_what_a_model_does_not_have_is_refused(
    method: str, request_: dict[str, Any], pooling: dict[str, Any], field: str, expected: str
) -> None:
    if method == "Embed":
        request_ = {"inputs": texts("hello")} | request_
    request = getattr(pb, f"{method}Request")(**request_)
    async with serving(pooling_model(**pooling)) as (_, _, client):
        call = getattr(client, method)()
        await call.write(request)
        await call.done_writing()
        error = await error_of(call)
    assert bad_field(error) == field
    assert expected in (error.details() or "")


@pytest.mark.parametrize(
    ("method", "pooling", "expected"),
    [
        ("Embed", RERANKER, "makes no vectors, only labels, which Classify, /classify and"),
        ("Classify", {}, "has no labels, only vectors, which Embed and /v1/embeddings return"),
        ("Score", RERANKER | {"labels": ["no", "yes"]}, "gives a pair 2 labels"),
        ("Score", RERANKER | {"scores_pairs": False}, "makes no vectors"),
        ("Score", RERANKER | {"pair_template": "{{"}, "template of pairs cannot be used: line 1"),
    ],
)
async def test_a_model_that_cannot_pool_so_is_named(
    method: str, pooling: dict[str, Any], expected: str
) -> None:
    async with serving(pooling_model(**pooling)) as (_, _, client):
        call = getattr(client, method)()
        await call.write(getattr(pb, f"{method}Request")())
        error = await error_of(call)
    assert error.code().name == "FAILED_PRECONDITION"
    assert expected in (error.details() or "")


async def test_models_are_chosen_by_the_work_that_they_do() -> None:
    generator, embedder = model_info("generator"), pooling_model()
    async with serving(generator, embedder) as (core, _, client), answering(core):
        await responses_of(client.Embed(), pb.EmbedRequest(inputs=texts("hello")))
        assert core.requests[0].submit.model == "embedder"
        call = client.Embed()
        await call.write(pb.EmbedRequest(options=pb.PoolingOptions(model="generator")))
        error = await error_of(call)
        assert error_info(error).reason == "WORK_KIND_UNSUPPORTED"
        assert error.details() == (
            "the workers of the model 'generator' do generation, not pooling; models served for "
            "pooling: embedder"
        )
        error = await error_of(client.Generate(pb.GenerateRequest(text="a", model="embedder")))
        assert error.details() == (
            "the workers of the model 'embedder' do pooling, not generation; models served for "
            "generation: generator"
        )


@pytest.mark.parametrize(("sizes", "dimensions"), [([2], 2), ([0], 1), ([], 3)])
async def test_a_vector_has_the_dimensions_that_were_requested(
    sizes: list[int], dimensions: int
) -> None:
    request = pb.EmbedRequest(inputs=texts([5]), embed=pb.EmbedOptions(dimensions=dimensions))
    model = pooling_model(matryoshka_dimensions=sizes)
    async with serving(model) as (core, _, client), answering(core):
        found = vectors_of(await responses_of(client.Embed(), request))
    assert found == {0: [5.0, 6.0, 7.0][:dimensions]}


async def test_options_belong_into_the_first_message() -> None:
    async with serving() as (core, _, client), answering(core):
        call = client.Embed()
        await call.write(pb.EmbedRequest(inputs=texts("hello")))
        await call.write(pb.EmbedRequest(options=pb.PoolingOptions(priority=1)))
        await call.done_writing()
        error = await error_of(call)
    assert bad_field(error) == "options"


async def test_token_ids_and_an_explicit_prompt_exclude_each_other() -> None:
    request = pb.EmbedRequest(inputs=texts([5], "fine"), embed=pb.EmbedOptions(prompt_name="query"))
    async with serving(pooling_model(**PROMPTS)) as (core, _, client), answering(core):
        responses = await responses_of(client.Embed(), request)
    assert list(vectors_of(responses)) == [1]
    assert "expected a text, got token_ids, without a prompt" in errors_of(responses)[0].message
