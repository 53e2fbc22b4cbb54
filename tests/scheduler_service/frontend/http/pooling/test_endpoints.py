"""Vectors, scores, ranks and labels over HTTP: what bodies become, and the shapes of answers."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.support.fake_core import FakeCore, FakeRequest
from tests.support.http_frontends import HttpServed, http_served, none_open
from tests.support.pooling import pooling_model, vector_of
from tests.support.tokenizers import tokens

USER = {"role": "user", "content": "hello"}
TEXTS = ["hello", "a longer text", "x"]


async def post(served: HttpServed, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a call that succeeds."""
    answer = await served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(served: HttpServed, path: str, **body: Any) -> tuple[int, str | None, str]:
    """The code, field and message of a refused call."""
    refused = await served.client.post(path, json=body)
    error = refused.json().get("error", refused.json())
    return refused.status_code, error.get("param"), error["message"]


def prompts(served: HttpServed) -> list[list[int]]:
    """The tokens of the texts that the core got."""
    return [request.prompt for request in served.core.requests]


def with_bos(text: str) -> list[int]:
    return [0, *tokens(text)]


INPUTS: dict[str, tuple[Any, list[list[int]]]] = {
    "a text": ("hello", [with_bos("hello")]),
    "texts": (TEXTS, [with_bos(text) for text in TEXTS]),
    "token ids": ([5, 6], [[5, 6]]),
    "lists of token ids": ([[5, 6], [7]], [[5, 6], [7]]),
}


@pytest.mark.parametrize("kind", INPUTS)
async def test_embeddings_are_the_vectors_of_inputs_in_their_order(
    poolers: HttpServed, kind: str
) -> None:
    value, expected = INPUTS[kind]
    answer = await post(poolers, "/v1/embeddings", model="embedder", input=value, user="a")
    assert prompts(poolers) == expected
    for index, (entry, prompt) in enumerate(zip(answer["data"], expected, strict=True)):
        vector = vector_of(prompt, 16)
        assert entry == {"object": "embedding", "index": index, "embedding": vector}
    num_tokens = sum(map(len, expected))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert (answer["object"], answer["model"]) == ("list", "embedder")


async def test_base64_holds_the_same_numbers_as_a_list(poolers: HttpServed) -> None:
    call = {"model": "embedder", "input": TEXTS, "dimensions": 5}
    lists = await post(poolers, "/v1/embeddings", **call)
    texts = await post(poolers, "/v1/embeddings", **call, encoding_format="base64")
    for one, other in zip(lists["data"], texts["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert decoded.tolist() == one["embedding"]
        assert len(decoded) == 5


SUBMITTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "priority": ({"priority": -3}, {"priority": -3}),
    "use_activation": ({"use_activation": False}, {"pooling.normalize": False}),
    "dimensions": ({"dimensions": 4}, {"pooling.dimensions": 4}),
    "add_special_tokens": ({"add_special_tokens": False}, {"prompt": tokens("hello")}),
    "truncate, right": ({"truncate_prompt_tokens": 2}, {"prompt": with_bos("hello")[:2]}),
    "truncate, left": (
        {"truncate_prompt_tokens": 2, "truncation_side": "left"},
        {"prompt": [0, *tokens("hello")[-1:]]},
    ),
    "query": ({"input_type": "query"}, {"prompt": with_bos("query: hello")}),
    "a synonym": ({"input_type": "search_document"}, {"prompt": with_bos("passage: hello")}),
    "a kind without a prompt": ({"input_type": "clustering"}, {"prompt": with_bos("hello")}),
    "a conversation": (
        {"input": None, "messages": [USER]},
        {"prompt": with_bos("[user]hello")},
    ),
    "a conversation, its answer begun": (
        {"input": None, "messages": [USER], "add_generation_prompt": True},
        {"prompt": with_bos("[user]hello[assistant]")},
    ),
    "neutral values": (
        {"embed_dtype": "float32", "endianness": "native", "padding": "do_not_pad"},
        {"prompt": with_bos("hello")},
    ),
}


def submitted(request: FakeRequest, path: str) -> Any:
    """A field of a submission, by its path."""
    if path == "prompt":
        return request.prompt
    value: Any = request.submit
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", SUBMITTED)
async def test_a_field_reaches_the_core(poolers: HttpServed, name: str) -> None:
    fields, expected = SUBMITTED[name]
    await post(poolers, "/v1/embeddings", **{"model": "embedder", "input": "hello"} | fields)
    [request] = poolers.core.requests
    assert {path: submitted(request, path) for path in expected} == expected


async def test_a_salt_makes_prefixes_of_their_own(poolers: HttpServed) -> None:
    await post(poolers, "/v1/embeddings", model="embedder", input="a", cache_salt="secret")
    [request] = poolers.core.requests
    assert len(request.submit.context) == 1


TASKS = {
    ("embedder", None): vector_of(with_bos("ab"), 16),
    ("embedder", "token_embed"): [vector_of([token], 16) for token in with_bos("ab")],
    ("late", None): [vector_of([token], 4) for token in with_bos("ab")],
    ("labels", None): vector_of(with_bos("ab"), 2),
    ("labels", "classify"): vector_of(with_bos("ab"), 2),
    ("tagger", None): [vector_of([token], 2) for token in with_bos("ab")],
}


@pytest.mark.parametrize(("model", "task"), TASKS)
async def test_pooling_answers_the_numbers_of_its_task(
    poolers: HttpServed, model: str, task: str | None
) -> None:
    answer = await post(poolers, "/pooling", model=model, input=["ab"], task=task)
    data = TASKS[model, task]
    assert answer["data"] == [{"object": "pooling", "index": 0, "data": data}]


async def test_classes_are_the_best_label_and_all_probabilities(poolers: HttpServed) -> None:
    answer = await post(poolers, "/classify", model="labels", input=[[3, 9], [9, 3]])
    assert answer["data"] == [
        {"index": 0, "label": "yes", "num_classes": 2, "probs": [3.0, 10.0]},
        {"index": 1, "label": "no", "num_classes": 2, "probs": [9.0, 4.0]},
    ]


PAIRS: list[dict[str, Any]] = [
    {"text_1": "a", "text_2": ["b", "a", "c"]},
    {"queries": "a", "documents": [{"text": "b"}, "a", "c"]},
    {"queries": ["a", "a", "a"], "items": ["b", "a", "c"]},
    {"data_1": ["a", "a", "a"], "data_2": ["b", "a", "c"]},
]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("pairs", PAIRS, ids=[" ".join(pairs) for pairs in PAIRS])
async def test_scores_have_the_order_of_pairs_by_any_of_their_names(
    poolers: HttpServed, pairs: dict[str, Any], path: str
) -> None:
    answer = await post(poolers, path, model="embedder", **pairs)
    entries = answer["data"]
    assert [entry["index"] for entry in entries] == [0, 1, 2]
    assert {entry["object"] for entry in entries} == {"score"}
    scores = [entry["score"] for entry in entries]
    assert max(scores) == scores[1] == 1.0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_ranks_are_the_best_documents_first(poolers: HttpServed, path: str) -> None:
    body: dict[str, Any] = {"model": "judge", "query": "a", "documents": ["b", {"text": "c"}, "d"]}
    answer = await post(poolers, path, **body)
    ranks = answer["results"]
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    assert ranks == sorted(ranks, key=lambda rank: (-rank["relevance_score"], rank["index"]))
    assert ranks[0]["document"] == {"text": "bcd"[ranks[0]["index"]]}
    assert answer["usage"]["total_tokens"] == sum(map(len, prompts(poolers)))
    best = await post(poolers, path, **body, top_n=1, return_documents=False)
    assert best["results"] == [{name: ranks[0][name] for name in ("index", "relevance_score")}]


async def test_an_instruction_without_a_place_is_refused(poolers: HttpServed) -> None:
    call = {"model": "judge", "query": "a", "documents": ["b"], "instruction": "be kind"}
    assert (await refusal(poolers, "/rerank", **call))[1] == "instruction"


async def test_the_id_of_a_call_comes_back(poolers: HttpServed) -> None:
    call = {"model": "embedder", "input": "a", "request_id": "my-id"}
    answer = await poolers.client.post("/v1/embeddings", json=call)
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("my-id", "embd-my-id")


async def test_the_list_of_models_has_the_longest_text_of_one_that_pools(
    poolers: HttpServed,
) -> None:
    models = (await poolers.client.get("/v1/models")).json()["data"]
    lengths = {model["id"]: model["max_model_len"] for model in models}
    assert (lengths["tiny"], lengths["embedder"], lengths["late"]) == (256, 256, 128)
    for model, length in lengths.items():
        call = {"model": model, "prompt": "a"}
        told = (await poolers.client.post("/tokenize", json=call)).json()
        assert told["max_model_len"] == length


async def test_a_model_needs_no_name_beside_those_that_do_other_work(poolers: HttpServed) -> None:
    code, param, message = await refusal(poolers, "/v1/embeddings", input="a")
    assert (code, param) == (400, "model")
    assert "embedder" in message
    assert "tiny" not in message


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/embeddings", {}, "input", "expected either input or messages"),
    ("/v1/embeddings", {"input": "a", "messages": [USER]}, "input", "expected either"),
    ("/v1/embeddings", {"input": []}, "input", "expected at least 1 item"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "expected at least 1 character"),
    ("/v1/embeddings", {"input": ["a", [5]]}, "input", "expected a text, token ids"),
    ("/v1/embeddings", {"input": [5, 9999]}, "input[1]", "vocabulary size 405, got 9999"),
    ("/v1/embeddings", {"input": "b" * 300}, None, "input: expected at most 256 tokens"),
    ("/v1/embeddings", {"input": [[5], [9999]]}, "input[1][0]", "vocabulary size 405, got 9999"),
    ("/v1/embeddings", {"input": ["a", "b" * 300]}, None, "input[1]: expected at most 256 tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions", "1 to 16, got 17"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "at least 1, got 0"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "'base64'"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "fp8"}, "embed_dtype", "are float32"),
    ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding", "no input is padded"),
    ("/v1/embeddings", {"input": "a", "input_type": "x"}, "input_type", "passage, query, search"),
    ("/v1/embeddings", {"input": [5], "input_type": "query"}, "input_type", "requires texts"),
    ("/v1/embeddings", {"input": "a", "normalize": True}, "normalize", "mean use_activation?"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "mean input_type?"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
    (
        "/v1/embeddings",
        {"input": "a", "add_generation_prompt": True},
        "add_generation_prompt",
        "requires messages",
    ),
    ("/v1/embeddings", {"model": "tiny", "input": "a"}, None, "do generation, not pooling"),
    ("/v1/embeddings", {"model": "nosuch", "input": "a"}, None, "unknown model 'nosuch'"),
    ("/v1/embeddings", {"model": "labels", "input": "a"}, None, "'labels' makes no vectors"),
    ("/v1/embeddings", {"model": "late", "input": "a"}, None, "a result per token of a text"),
    ("/classify", {"input": "a"}, None, "'embedder' has no labels"),
    ("/classify", {"model": "tagger", "input": "a"}, None, "one per text: /pooling returns them"),
    ("/v1/embeddings", {"model": "tagger", "input": "a"}, None, "'tagger' makes no vectors"),
    ("/classify", {"model": "labels", "input": "a", "dimensions": 3}, "dimensions", "unknown"),
    ("/pooling", {"input": "a", "task": "plugin"}, "task", "'token_classify', got"),
    ("/pooling", {"input": "a", "task": "classify"}, None, "'embedder' has no labels"),
    ("/pooling", {"model": "labels", "input": "a", "dimensions": 3}, "dimensions", "requires a"),
    ("/pooling", {"model": "labels", "input": "a", "task": "token_classify"}, "task", "'classify'"),
    ("/score", {"text_1": "a"}, "text_2", "required"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as text_2 has, 1, got 2"),
    ("/score", {"queries": "a", "documents": ["b", ""]}, "documents[1]", "at least 1 character"),
    ("/score", {"text_1": "a", "text_2": "b", "items": "c"}, "items", "did you mean text_2?"),
    ("/v1/embeddings", {"inputs": "a"}, "inputs", "did you mean input?"),
    ("/score", {"text_1": "a" * 9999, "text_2": ["b"] * 9999}, "text_1", "1677 characters"),
    ("/score", {"text_1": "a", "text_2": ["b", "c" * 300]}, None, "text_2[1]: expected at most"),
    ("/score", {"text_1": ["a" * 300, "b"], "text_2": ["c", "d"]}, None, "text_1[0]: expected"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query", "at least 1 character"),
    ("/rerank", {"query": "a", "documents": ["b", "c" * 300]}, None, "documents[1]: expected"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0, got -1"),
    (
        "/rerank",
        {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
        "max_tokens_per_doc",
        "not supported: use truncate_prompt_tokens",
    ),
    ("/v2/rerank", {"query": "a", "documents": []}, None, "documents: expected at least 1 item"),
    ("/v2/embed", {"texts": []}, None, "texts: expected at least 1 item"),
    ("/v2/embed", {"texts": ["a"], "images": ["x"]}, None, "images: not supported: the models"),
    ("/v2/embed", {"texts": ["a"], "input_type": "image"}, None, "input_type: expected one of"),
    ("/v2/embed", {"texts": ["a"], "output_dimension": 17}, None, "output_dimension: expected 1"),
    ("/v2/embed", {"texts": ["a"], "max_tokens": 999}, None, "max_tokens: expected -1, or 1 to"),
    (
        "/v2/embed",
        {"texts": ["a", "b" * 300], "truncate": "NONE"},
        None,
        "texts[1]: expected at most 256 tokens, which is the model's limit, got 301; truncate",
    ),
    (
        "/v2/embed",
        {"texts": ["a", "bc"], "truncate": "NONE", "max_tokens": 2},
        None,
        "texts[1]: expected at most max_tokens=2 tokens, got 3",
    ),
    (
        "/v2/embed",
        {"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 4},
        None,
        "embedding_types: expected no bits",
    ),
]


@pytest.mark.parametrize("path", sorted({path for path, *_ in REFUSED}))
async def test_a_bad_call_is_refused_by_its_field(poolers: HttpServed, path: str) -> None:
    for _, body, param, message in (row for row in REFUSED if row[0] == path):
        code, found, told = await refusal(poolers, path, **{"model": "embedder"} | body)
        assert code == (404 if "unknown model" in message else 400), body
        assert message in told, body
        assert found == param, body


async def test_a_call_fails_with_the_error_of_its_first_text_that_does(poolers: HttpServed) -> None:
    texts = ["a", "b" * 300, "c", "d" * 400]
    _, _, message = await refusal(poolers, "/v1/embeddings", model="embedder", input=texts)
    assert message.startswith("input[1]: ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_generation_asked_of_an_embedder_is_refused(poolers: HttpServed, path: str) -> None:
    fields = {"prompt": "a"} if path == "/v1/completions" else {"messages": [USER]}
    fields = {"input": "a"} if path == "/v1/responses" else fields
    code, _, message = await refusal(poolers, path, model="embedder", **fields)
    assert code == 400
    assert "'embedder' do pooling, not generation; models served for generation: tiny" in message


async def test_cohere_gets_vectors_of_every_type(poolers: HttpServed) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    call = {"model": "embedder", "texts": ["ab"], "input_type": "search_query"}
    answer = await post(poolers, "/v2/embed", **call, embedding_types=types)
    [prompt] = prompts(poolers)
    assert prompt == with_bos("query: ab")
    vector = np.array(vector_of(prompt, 16), np.float32)
    decoded = {name: np.array(answer["embeddings"][name][0]) for name in types[:-1]}
    assert answer["embeddings"].keys() == set(types)
    assert base64.b64decode(answer["embeddings"]["base64"][0]) == vector.tobytes()
    assert decoded["float"].tolist() == vector.tolist()
    assert decoded["int8"].tolist() == np.rint(vector / vector.max() * 127).tolist()
    assert (decoded["uint8"] - 128).tolist() == decoded["int8"].tolist()
    assert decoded["ubinary"].tolist() == np.packbits(vector > 0).tolist()
    assert (decoded["ubinary"] - 128).tolist() == decoded["binary"].tolist()
    assert answer["texts"] == ["ab"]
    assert answer["response_type"] == "embeddings_by_type"
    billed = answer["meta"]["billed_units"]
    assert billed == {"input_tokens": len(prompt)}


ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a", "task": "token_embed"},
    "/classify": {"model": "labels", "input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"], "embedding_types": ["float", "base64", "binary"]},
}


@pytest.mark.parametrize("path", ANSWERS)
async def test_answers_have_the_fields_of_the_openapi_document(
    poolers: HttpServed, path: str
) -> None:
    document = (await poolers.client.get("/openapi.json")).json()
    responses = document["paths"][path]["post"]["responses"]
    schemas = {
        name: schema | {"additionalProperties": False} if "properties" in schema else schema
        for name, schema in document["components"]["schemas"].items()
    }
    described = responses["200"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator(described | {"components": {"schemas": schemas}})
    validator.validate(await post(poolers, path, **{"model": "embedder"} | ANSWERS[path]))


CUT = {"START": [0, *tokens("d")], "END": with_bos("c")}


@pytest.mark.parametrize("end", CUT)
async def test_cohere_cuts_the_end_that_a_call_names(poolers: HttpServed, end: str) -> None:
    await post(poolers, "/v2/embed", model="embedder", texts=["cd"], truncate=end, max_tokens=2)
    assert prompts(poolers) == [CUT[end]]


async def test_a_long_answer_is_sent_in_parts(poolers: HttpServed) -> None:
    texts = ["a"] * 5000
    call = {"model": "embedder", "input": texts}
    answer = await poolers.client.post("/v1/embeddings", json=call)
    assert answer.headers["transfer-encoding"] == "chunked"
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(5000))
    assert all(entry["embedding"] == vector_of(with_bos("a"), 16) for entry in data)


async def test_texts_of_a_client_that_leaves_are_cancelled() -> None:
    core = FakeCore(models=[pooling_model()])
    async with http_served(core) as served:
        call = asyncio.create_task(served.client.post("/v1/embeddings", json={"input": "a"}))
        request = await served.core.next_request()
        call.cancel()
        await request.cancelled()
        await none_open(served.frontend)
