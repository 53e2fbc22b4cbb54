"""The endpoints, and their answers."""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json

from scheduler_service.errors import PromptTooLong
from scheduler_service.frontend.http.middleware import Shape
from scheduler_service.frontend.http.pooling import bodies, encoding, requests
from scheduler_service.frontend.http.pooling.encoding import float_list, json_list, with_field
from scheduler_service.frontend.http.pooling.serving import Endpoint
from scheduler_service.frontend.pooling.call import PoolingResult
from scheduler_service.frontend.pooling.service import PoolingAnswer


def write_numbers(
    prefix: str,
    kind: str,
    field: str,
    body: bodies.EmbeddingsRequest,
    answer: PoolingAnswer,
    call_id: str,
) -> Iterator[bytes]:
    """The answer of `/v1/embeddings` or `/pooling`, which differ in names: the prefix of the id,
    the kind of an entry's object, and its field with the numbers."""
    size = len(answer.labels) or body.dimensions or answer.model.info.pooling.vector_size

    def numbers(result: PoolingResult) -> Iterable[bytes]:
        if body.encoding_format == "base64":
            return [encoding.base64_text(result.values)]
        if requests.is_per_token(body, answer.model):
            return json_list([float_list(row)] for row in result.array(size))
        return [float_list(result.array(size)[0])]

    entries = (
        with_field({"object": kind, "index": result.index}, field, numbers(result))
        for result in answer.results
    )
    return _list(answer, f"{prefix}-{call_id}", entries)


def write_classes(_: Any, answer: PoolingAnswer, call_id: str) -> Iterator[bytes]:
    """The answer of `/classify`."""
    labels = answer.labels

    def entry(result: PoolingResult) -> Iterator[bytes]:
        [values] = result.array(len(labels))
        label = labels[int(values.argmax())]
        head = {"index": result.index, "label": label, "num_classes": len(labels)}
        return with_field(head, "probs", [float_list(values)])

    return _list(answer, f"classify-{call_id}", map(entry, answer.results))


def write_scores(_: Any, answer: PoolingAnswer, call_id: str) -> Iterator[bytes]:
    """The answer of `/score`."""

    def entry(result: PoolingResult) -> list[bytes]:
        score = encoding.rounded(result.score)
        return [to_json({"object": "score", "index": result.index, "score": score})]

    return _list(answer, f"score-{call_id}", map(entry, answer.results))


def write_ranks(body: bodies.RerankBody, answer: PoolingAnswer, call_id: str) -> Iterator[bytes]:
    """The answer of `/rerank`."""
    documents = requests.texts_of(body.documents)

    def entry(result: PoolingResult) -> bodies.RankEntry:
        relevance = encoding.rounded(result.score)
        rank: bodies.RankEntry = {"index": result.index, "relevance_score": relevance}
        if body.return_documents:
            rank["document"] = {"text": documents[result.index]}
        return rank

    ranks: bodies.Ranks = {
        "id": f"rerank-{call_id}",
        "model": answer.name,
        "usage": _usage(answer),
        "results": [entry(result) for result in answer.results],
    }
    yield to_json(ranks)


def write_cohere_vectors(
    body: bodies.CohereEmbedBody, answer: PoolingAnswer, call_id: str
) -> Iterator[bytes]:
    """The answer of `/v2/embed`. Raises PromptTooLong: Cohere's limit is that of a call."""
    limit = body.max_tokens if body.truncate == "NONE" else None
    for result in answer.results:
        if limit is not None and result.num_tokens > limit:
            expected = f"expected at most max_tokens={limit} tokens, got {result.num_tokens}"
            raise PromptTooLong(f"texts[{result.index}]: {expected}; truncate = END cuts it")
    billed = {"input_tokens": answer.usage.prompt_tokens}
    head = {
        "id": call_id,
        "response_type": "embeddings_by_type",
        "texts": body.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
    }
    size = body.output_dimension or answer.model.info.pooling.vector_size
    vectors = [result.array(size)[0] for result in answer.results]
    return with_field(head, "embeddings", encoding.by_type(body.embedding_types, vectors))


def cohere_error(_: int, body: dict[str, Any]) -> dict[str, Any]:
    """Convert an error from OpenAI's shape to Cohere's."""
    return {"message": body["error"]["message"]}


def _usage(answer: PoolingAnswer) -> bodies.PoolingUsageBody:
    return {
        "prompt_tokens": answer.usage.prompt_tokens,
        "total_tokens": answer.usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.usage.cached_tokens},
    }


def _list(
    answer: PoolingAnswer, answer_id: str, entries: Iterable[Iterable[bytes]]
) -> Iterator[bytes]:
    head = {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": answer.name,
        "usage": _usage(answer),
    }
    return with_field(head, "data", json_list(entries))


SCORE_FIELDS = (
    (r"^pairs(\[\d+\])\.first", r"text_1\1"),
    (r"^pairs(\[\d+\])(\.second)?", r"text_2\1"),
)
COHERE_FIELDS = (
    (r"^input\b", "texts"),
    (r"^dimensions$", "output_dimension"),
    (r"^truncate_prompt_tokens$", "max_tokens"),
    (r"\btruncate_prompt_tokens = -1", "truncate = END"),
)
"""Names of fields in errors: see `serving.FIELDS`."""

write_vectors = partial(write_numbers, "embd", "embedding", "embedding")
write_pooled = partial(write_numbers, "pool", "pooling", "data")
ENDPOINTS = (
    Endpoint("/v1/embeddings", bodies.EmbeddingsRequest, requests.embed_request, write_vectors),
    Endpoint("/pooling", bodies.PoolingBody, requests.pooling_request, write_pooled),
    Endpoint("/classify", bodies.ClassifyBody, requests.classify_request, write_classes),
    *(
        Endpoint(path, bodies.ScoreBody, requests.score_request, write_scores, fields=SCORE_FIELDS)
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint(path, bodies.RerankBody, requests.rank_request, write_ranks, bodies.Ranks)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Endpoint(
        "/v2/embed",
        bodies.CohereEmbedBody,
        requests.cohere_request,
        write_cohere_vectors,
        bodies.CohereEmbeddings,
        COHERE_FIELDS,
    ),
)
ERROR_SHAPES: dict[str, Shape] = {
    endpoint.path: cohere_error for endpoint in ENDPOINTS if endpoint.is_cohere
}
"""By path, wherever its errors come from."""

router = APIRouter(tags=["Pooling"])
for _endpoint in ENDPOINTS:
    _endpoint.add_to(router)
