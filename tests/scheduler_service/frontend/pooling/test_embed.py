"""Embed: many texts of a call to vectors, with errors of single texts by index."""

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import pooling_pb2
from tests.support.frontends import bad_field, error_info
from tests.support.pooling import (
    answering,
    errors_of,
    responses_of,
    serving,
    texts,
    vector_of,
    vectors_of,
)
from tests.support.tokenizers import byte_level


async def test_every_text_gets_the_vector_of_its_tokens_with_special_tokens_and_usage() -> None:
    words = ["hello", "hello world", "quick"]
    async with serving() as (core, _, client), answering(core):
        request = pb.EmbedRequest(inputs=[*texts(*words), *texts([5, 6])])
        responses = await responses_of(client.Embed(), request)
    ids = [byte_level().encode(word).ids for word in words] + [[5, 6]]
    assert vectors_of(responses) == {i: vector_of(tokens) for i, tokens in enumerate(ids)}
    assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].usage.prompt_tokens == sum(map(len, ids))
    submit = core.requests[0].submit
    assert submit.pooling.normalize
    assert submit.pooling.type == pooling_pb2.POOLING_TYPE_LAST


async def test_a_bad_text_fails_by_its_index_and_no_other() -> None:
    bad = [*texts("", "x" * 300, [], [9999], ("a", "b")), pb.PoolingInput()]
    request = pb.EmbedRequest(inputs=[*texts("good"), *bad, *texts("fine")])
    async with serving() as (core, _, client), answering(core):
        responses = await responses_of(client.Embed(), request)
    assert set(vectors_of(responses)) == {0, 7}
    found = errors_of(responses)
    assert {i: bad_field(e.status) for i, e in found.items() if e.code == 3} == {
        1: "inputs[1].text",
        3: "inputs[3].token_ids.ids",
        4: "inputs[4].token_ids.ids[0]",
        5: "inputs[5]",
        6: "inputs[6]",
    }
    too_long = error_info(found[2].status)
    assert too_long.reason == "PROMPT_TOO_LONG"
    assert dict(too_long.metadata) == {
        "field": "inputs[2].text",
        "num_prompt_tokens": "301",
        "max_text_tokens": "256",
    }


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL])
async def test_an_error_of_the_core_is_that_of_its_text(code: grpc.StatusCode) -> None:
    async with serving() as (core, _, client):
        call = client.Embed()
        await call.write(pb.EmbedRequest(inputs=texts("one", "two")))
        await call.done_writing()
        first, second = await core.next_request(), await core.next_request()
        await first.fail(code, "GENERATION_FAILED")
        await second.pool(1, 2, 3)
        responses = await responses_of(call)
    assert errors_of(responses)[0].code == code.value[0]
    assert vectors_of(responses) == {1: [1, 2, 3]}
