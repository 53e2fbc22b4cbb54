"""Vectors, scores, ranks and labels through both clients, from a real frontend."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.columns import pack_floats
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import pooling_pb2
from pagewire.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from pagewire_client import AsyncClient, Client, InvalidArgument
from tests.support.fake_core import FakeRequest
from tests.support.frontends import running_frontend
from tests.support.pooling import answer, answering, pooling_model, serving, vector_of
from tests.support.tokenizers import byte_level

KINDS = pytest.mark.parametrize("kind", [AsyncClient, Client])


@asynccontextmanager
async def client_of(kind: Any, **pooling: Any) -> AsyncIterator[Any]:
    """Calls a client of either kind, of a model that pools."""
    async with serving(pooling_model(**pooling)) as (core, frontend, _), answering(core):
        client = kind(frontend.runner.address)
        yield lambda method, *args, **options: called(client, method, *args, **options)
        await called(client, "close")


async def called(client: Any, method: str, *args: Any, **options: Any) -> Any:
    """A method's result; a client that blocks does so in a thread."""
    bound = getattr(client, method)
    if inspect.iscoroutinefunction(bound):
        return await bound(*args, **options)
    return await asyncio.to_thread(bound, *args, **options)


def ids_of(text: str) -> list[int]:
    return list(byte_level().encode(text).ids)


@KINDS
async def test_vectors_come_in_the_order_of_the_texts(kind: Any) -> None:
    texts = [f"text {number}" for number in range(600)]
    async with client_of(kind) as call:
        vectors = await call("embed", [*texts, [7, 8]])
        (single,) = await call("embed", "text 0")
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [*(vector_of(ids_of(text)) for text in texts), vector_of([7, 8])]
    assert single.tolist() == vector_of(ids_of("text 0"))


@KINDS
async def test_every_token_has_a_vector(kind: Any) -> None:
    async with client_of(kind) as call:
        first, second = await call("embed_tokens", ["hello", [7, 8]])
    assert first.tolist() == [vector_of([token]) for token in ids_of("hello")]
    assert second.tolist() == [vector_of([7]), vector_of([8])]


@KINDS
async def test_pairs_get_scores_and_documents_their_order(kind: Any) -> None:
    dot = {"similarity": pooling_pb2.SIMILARITY_DOT}
    documents = ["0 1", "stop END", "2"]
    expected = [float(np.dot(vector_of(ids_of("1")), vector_of(ids_of(d)))) for d in documents]
    order = sorted(range(3), key=lambda index: -expected[index])
    async with client_of(kind, **dot) as call:
        assert await call("score", [("1", d) for d in documents]) == expected
        found = await call("rank", "1", documents, top_n=2)
    assert [(d.index, d.score, d.document) for d in found] == [
        (index, expected[index], documents[index]) for index in order[:2]
    ]


@KINDS
async def test_texts_and_pairs_get_labels(kind: Any) -> None:
    labels = {"labels": ["low", "middle", "high"], "vector_size": 0}
    async with client_of(kind, classifier_type=pooling_pb2.POOLING_TYPE_LAST, **labels) as call:
        found = await call("classify", ["hello", ("a", "b")], apply_activation=False)
        (pair,) = await call("classify", ("a", "b"), apply_activation=False)
    assert pair.probs.tolist() == found[1].probs.tolist()
    assert found[0].probs.tolist() == vector_of(ids_of("hello"))
    assert [text.label for text in found] == [
        labels["labels"][int(text.probs.argmax())] for text in found
    ]


@KINDS
async def test_an_error_names_the_text(kind: Any) -> None:
    async with client_of(kind) as call:
        with pytest.raises(
            InvalidArgument, match=r"^texts\[1\]: expected a text that is not empty"
        ):
            await call("embed", ["hello", ""])
        with pytest.raises(
            InvalidArgument, match=r"^embed\.dimensions: expected 3: the model was not"
        ):
            await call("embed", ["hello"], dimensions=2)
        with pytest.raises(TypeError, match="unknown arguments: dimension"):
            await call("embed", ["hello"], dimension=2)
        with pytest.raises(InvalidArgument, match=r"^texts\[1\]\[1\]: expected a token id below"):
            await call("embed", ["hello", [7, 99999]])


@KINDS
async def test_a_call_continues_at_another_frontend_with_what_has_no_result(kind: Any) -> None:
    texts = [f"text {number}" for number in range(600)]
    seen: list[FakeRequest] = []
    half = asyncio.Event()

    async def first_half(request: FakeRequest) -> None:
        seen.append(request)
        if len(seen) > 300 and not half.is_set():
            half.set()
        elif not half.is_set() or request.attachment is not seen[0].attachment:
            await answer(request)

    async with (
        serving() as (core, first, _),
        running_frontend(core.address) as second,
        answering(core, first_half),
    ):
        client = kind([first.runner.address, second.runner.address])
        calling = asyncio.create_task(called(client, "embed", texts))
        await half.wait()
        await first.stop()
        assert (await calling).tolist() == [vector_of(ids_of(text)) for text in texts]
        again = [r for r in seen if r.attachment is not seen[0].attachment]
        assert 0 < len(again) < len(texts)
        await called(client, "close")


class LosesTheEnd(InferenceServiceServicer):
    """Answers every text, and ends the call before it says that there are no more answers."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def Embed(self, requests: Any, context: Any) -> AsyncIterator[pb.EmbedResponse]:
        self.num_calls += 1
        async for request in requests:
            for index, _ in enumerate(request.inputs):
                vector = pb.Embedding(index=index, num_tokens=1, values=pack_floats([index]))
                yield pb.EmbedResponse(embeddings=[vector])
        await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")


@KINDS
async def test_nothing_is_requested_again_where_only_the_end_is_lost(kind: Any) -> None:
    server, service = grpc.aio.server(), LosesTheEnd()
    add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = kind(f"127.0.0.1:{port}")
    assert (await called(client, "embed", ["a", "b"])).tolist() == [[0.0], [1.0]]
    assert service.num_calls == 1
    await called(client, "close")
    await server.stop(0)


@pytest.mark.parametrize(("name", "value"), [("truncate_prompt_tokens", 2**40), ("dimensions", -1)])
def test_an_option_that_no_message_can_hold_is_named(name: str, value: int) -> None:
    options: Any = {name: value}
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(ValueError, match=f"{name} cannot be {value}: "),
    ):
        client.embed(["one"], **options)


@KINDS
@pytest.mark.parametrize(
    ("method", "arguments", "options", "words"),
    [
        ("embed", [["a", None]], {}, r"texts\[1\]: expected a text or a list of token ids"),
        ("embed", [["a", b"b"]], {}, r"texts\[1\]: expected a text .* got bytes"),
        ("embed", ["a"], {"pooling_type": "all"}, "pooling_type must be 'last', 'mean' or 'cls'"),
        ("embed_tokens", ["a"], {"pooling_type": "cls"}, "pooling_type: expected none"),
        ("classify", [[("a", 5)]], {}, r"texts\[0\]: expected two texts, got tuple"),
        ("score", [["ab", "cd"]], {}, r"pairs\[0\]: expected two texts, got str"),
        ("score", [[("a", "b"), ("c",)]], {}, r"pairs\[1\]: expected two texts, got tuple"),
        ("rank", ["a", "bc"], {}, "documents: expected a list of texts, got a text"),
        ("rank", ["a", ["b", 5]], {}, r"documents\[1\]: expected a text, got int"),
        ("rank", ["a", ["\ud800"]], {}, r"documents\[0\]: .* unpaired surrogate"),
        ("rank", ["a", ["b"]], {"top_n": -1}, "top_n cannot be -1"),
    ],
)
async def test_what_cannot_be_sent_is_named(
    kind: Any, method: str, arguments: list[Any], options: dict[str, Any], words: str
) -> None:
    client = kind("127.0.0.1:1")
    with pytest.raises(ValueError, match=words):
        await called(client, method, *arguments, **options)


@KINDS
async def test_texts_may_be_arrays_and_documents_any_iterable(kind: Any) -> None:
    async with client_of(kind, similarity=pooling_pb2.SIMILARITY_DOT) as call:
        assert (await call("embed", np.array([7, 8]))).tolist() == [vector_of([7, 8])]
        assert len(await call("rank", "1", iter(["2", "3"]))) == 2
