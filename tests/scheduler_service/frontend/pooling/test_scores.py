"""Scores of pairs, the order of documents, and labels."""

import math
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import pooling_pb2
from tests.support.fake_core import FakeRequest
from tests.support.frontends import bad_field
from tests.support.pooling import (
    answering,
    errors_of,
    pooling_model,
    responses_of,
    serving,
    texts,
    vector_of,
    vectors_of,
)
from tests.support.tokenizers import byte_level

A, B = (np.array(vector_of(byte_level().encode(text).ids), np.float64) for text in ("0", "1 2"))
LABELS = ["negative", "neutral", "positive"]
SOFTMAX = pooling_pb2.LABEL_ACTIVATION_SOFTMAX
SIGMOID = pooling_pb2.LABEL_ACTIVATION_SIGMOID
RERANKER = {"vector_size": 0, "labels": ["score"], "scores_pairs": True}


def rows(text: str) -> Any:
    return np.array([vector_of([token]) for token in byte_level().encode(text).ids])


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        (pooling_pb2.SIMILARITY_UNSPECIFIED, A @ B / math.sqrt((A @ A) * (B @ B))),
        (pooling_pb2.SIMILARITY_COSINE, A @ B / math.sqrt((A @ A) * (B @ B))),
        (pooling_pb2.SIMILARITY_DOT, A @ B),
        (pooling_pb2.SIMILARITY_EUCLIDEAN, -np.linalg.norm(A - B)),
        (pooling_pb2.SIMILARITY_MANHATTAN, -np.abs(A - B).sum()),
        (pooling_pb2.SIMILARITY_MAX_SIM, (rows("0") @ rows("1 2").T).max(axis=1).sum()),
    ],
)
async def test_a_score_is_the_similarity_of_two_vectors(similarity: Any, expected: float) -> None:
    pairs = [pb.TextPair(first="0", second="1 2")] * 2
    model = pooling_model(similarity=similarity)
    async with serving(model) as (core, _, client), answering(core):
        responses = await responses_of(client.Score(), pb.ScoreRequest(pairs=pairs))
    scores = [score for response in responses for score in response.scores]
    assert [score.score for score in scores] == [pytest.approx(expected, rel=1e-6)] * 2
    assert len(core.requests) == 3  # the first text is computed once
    lengths = [len(byte_level().encode(text).ids) for text in ("0", "1 2")]
    assert scores[0].num_tokens == sum(lengths)
    assert responses[-1].usage.prompt_tokens == lengths[0] + 2 * lengths[1]


@pytest.mark.parametrize("applies", [True, False])
async def test_documents_are_sorted_by_the_scores_of_a_reranker(applies: bool) -> None:
    logits = {"a": 0.5, "b": 2.0, "c": -1.0, "d": 2.0}

    async def answer(request: FakeRequest) -> None:
        letter = byte_level().decode(request.prompt)[-1]
        await request.pool(logits[letter])

    request = pb.RankRequest(
        query="0",
        documents=["a", "b", "", "c", "d"],
        top_n=3,
        score=pb.ScoreOptions(apply_activation=applies),
    )
    model = pooling_model(label_activation=SIGMOID, **RERANKER)
    async with serving(model) as (core, _, client), answering(core, answer):
        (response,) = await responses_of(client.Rank(), request)
    assert [entry.index for entry in response.documents] == [1, 4, 0, 2]
    scores = [2.0, 2.0, 0.5]
    expected = [1 / (1 + math.exp(-score)) if applies else score for score in scores]
    assert [entry.score for entry in response.documents[:3]] == pytest.approx(expected)
    assert bad_field(errors_of([response], "documents")[2].status) == "documents[2]"


async def test_the_texts_of_a_ranking_have_the_prompts_of_their_kinds() -> None:
    prompts = [pooling_pb2.NamedPrompt(name=name, text=f"{name} ") for name in ("query", "passage")]
    model = pooling_model(prompts=prompts)
    request = pb.RankRequest(query="0", documents=["1"])
    async with serving(model) as (core, _, client), answering(core):
        await responses_of(client.Rank(), request)
    sent = [byte_level().decode(request.prompt) for request in core.requests]
    assert sent == ["query 0", "passage 1"]


@pytest.mark.parametrize(
    ("activation", "applies", "expected"),
    [
        (SOFTMAX, True, np.exp(vector_of([5])) / np.exp(vector_of([5])).sum()),
        (SIGMOID, True, 1 / (1 + np.exp(-np.array(vector_of([5]))))),
        (SOFTMAX, False, vector_of([5])),
        (pooling_pb2.LABEL_ACTIVATION_UNSPECIFIED, True, vector_of([5])),
    ],
)
async def test_labels_get_the_activation_of_the_model(
    activation: Any, applies: bool, expected: Any
) -> None:
    model = pooling_model(vector_size=0, labels=LABELS, label_activation=activation)
    request = pb.ClassifyRequest(
        inputs=texts([5], ("", "b")), classify=pb.ClassifyOptions(apply_activation=applies)
    )
    async with serving(model) as (core, _, client), answering(core):
        responses = await responses_of(client.Classify(), request)
    assert list(responses[0].labels) == LABELS
    assert vectors_of(responses, "classifications")[0] == pytest.approx(list(expected), rel=1e-6)
    error = errors_of(responses, "classifications")[1]
    assert bad_field(error.status) == "inputs[1].pair.first"


async def test_each_token_gets_labels_from_a_model_that_classifies_tokens() -> None:
    kind = pooling_pb2.POOLING_TYPE_ALL
    model = pooling_model(
        vector_size=0, labels=LABELS, classifier_type=kind, label_activation=SOFTMAX
    )
    async with serving(model) as (core, _, client), answering(core):
        request = pb.ClassifyRequest(inputs=texts([5, 9]))
        responses = await responses_of(client.Classify(), request)
    found = np.array(vectors_of(responses, "classifications")[0]).reshape(2, 3)
    powers = np.exp([vector_of([5]), vector_of([9])])
    assert found == pytest.approx(powers / powers.sum(axis=1, keepdims=True), rel=1e-6)
