"""A frontend with HTTP, and a core with a model of every kind that answers texts at once."""

from collections.abc import AsyncIterator

import pytest_asyncio

from pagewire.v1 import model_pb2, pooling_pb2
from tests.support.fake_core import FakeCore, FakeRequest, model_info
from tests.support.http_frontends import HttpServed, http_served
from tests.support.pooling import answering, pooling_model, vector_of

ALL = pooling_pb2.POOLING_TYPE_ALL
PROMPTS = [
    pooling_pb2.NamedPrompt(name="query", text="query: "),
    pooling_pb2.NamedPrompt(name="passage", text="passage: "),
]
CLASSIFIER = {
    "vector_size": 0,
    "default_type": pooling_pb2.POOLING_TYPE_UNSPECIFIED,
    "types": [],
    "classifier_type": pooling_pb2.POOLING_TYPE_CLS,
}
LABELS = ["no", "yes"]
SIZES = {"embedder": 16, "late": 4, "labels": 2, "tagger": 2, "judge": 1}
"""Numbers in a vector, by model."""
MODELS = [
    pooling_model("embedder", vector_size=16, matryoshka_dimensions=[0], prompts=PROMPTS),
    pooling_model(
        "late",
        vector_size=4,
        default_type=ALL,
        similarity=pooling_pb2.SIMILARITY_MAX_SIM,
        max_text_tokens=128,
    ),
    pooling_model("labels", **CLASSIFIER, labels=LABELS),
    pooling_model("tagger", **CLASSIFIER | {"classifier_type": ALL}, labels=LABELS),
    pooling_model(
        "judge",
        **CLASSIFIER,
        labels=["score"],
        label_activation=pooling_pb2.LABEL_ACTIVATION_SIGMOID,
        scores_pairs=True,
    ),
]


async def answer(request: FakeRequest) -> None:
    """Answer a text with `vector_of` its tokens, or of each of its tokens."""
    pooling, prompt = request.submit.pooling, request.prompt
    size = pooling.dimensions or SIZES[request.submit.model]
    parts = [[token] for token in prompt] if pooling.type == ALL else [prompt]
    await request.pool(*[number for part in parts for number in vector_of(part, size)])


@pytest_asyncio.fixture
async def poolers() -> AsyncIterator[HttpServed]:
    """The frontend, which serves a generator, too."""
    generator = model_info("tiny", work_kinds=[model_pb2.WORK_KIND_GENERATION])
    core = FakeCore(models=[generator, *MODELS])
    async with http_served(core) as served, answering(core, answer):
        while len(served.frontend.models.served) < len(core.models):
            await served.frontend.models.changed.wait()
        yield served
