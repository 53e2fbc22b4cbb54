"""Tokenize, Detokenize, GetModel and the status, over a real channel."""

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import status_pb2
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import (
    bad_field,
    client_of,
    error_info,
    error_of,
    generate_request,
    model_ready,
    read_all,
    read_until_error,
    running_frontend,
    text_of,
    tokens_of,
)
from tests.support.tokenizers import BOS, EOS, byte_level, model_files


@pytest.fixture
async def ready(served: Served) -> Served:
    await model_ready(served.frontend)
    return served


async def test_tokenize_gives_ids_names_and_the_models_length(ready: Served) -> None:
    response = await ready.client.Tokenize(pb.TokenizeRequest(text="hello fox"))
    encoding = byte_level().encode("hello fox")
    assert list(response.token_ids) == encoding.ids
    assert list(response.tokens) == encoding.tokens
    assert response.tokens[0] == BOS
    assert response.max_model_len == 256
    bare = await ready.client.Tokenize(pb.TokenizeRequest(text="hello", add_special_tokens=False))
    assert BOS not in bare.tokens


async def test_tokenize_takes_a_chat_and_an_empty_text(ready: Served) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    response = await ready.client.Tokenize(pb.TokenizeRequest(chat=chat))
    text = byte_level().decode(list(response.token_ids), skip_special_tokens=False)
    assert text == f"{BOS}[user]hi[assistant]"
    response = await ready.client.Tokenize(pb.TokenizeRequest(text="", add_special_tokens=False))
    assert list(response.token_ids) == []


async def test_detokenize_gives_the_text_with_special_tokens_on_request(ready: Served) -> None:
    ids = byte_level().encode("hello 😀").ids
    response = await ready.client.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert response.text == "hello 😀"
    response = await ready.client.Detokenize(
        pb.DetokenizeRequest(token_ids=[byte_level().token_to_id(EOS)], skip_special_tokens=False)
    )
    assert response.text == EOS


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "input"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.Chat()), "chat.messages"),
        (
            "Tokenize",
            pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="tool")])),
            "chat.messages",
        ),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 405]), "token_ids[1]"),
        ("WatchStatus", pb.WatchStatusRequest(interval_ms=99), "interval_ms"),
        (
            "GetStatus",
            pb.GetStatusRequest(detail=status_pb2.StatusDetail(max_requests=0)),
            "detail.max_requests",
        ),
        (
            "WatchStatus",
            pb.WatchStatusRequest(detail=status_pb2.StatusDetail(max_requests=4097)),
            "detail.max_requests",
        ),
    ],
)
async def test_bad_input_is_named(ready: Served, method: str, request_: object, field: str) -> None:
    error = await error_of(getattr(ready.client, method)(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_field(error) == field


async def test_a_template_that_refuses_a_chat_names_the_messages(ready: Served) -> None:
    request = generate_request(None)
    request.chat.messages.add(role="tool", content="x")
    error = await error_of(ready.client.Generate(request))
    assert bad_field(error) == "chat.messages"
    assert "no tools here" in (error.details() or "")


async def test_the_model_tells_about_itself(ready: Served) -> None:
    for request in (pb.GetModelRequest(), pb.GetModelRequest(model="tiny")):
        assert (await ready.client.GetModel(request)).model == model_info()
    for name in ("other", "\N{GRINNING FACE}" * 10_000):
        error = await error_of(ready.client.GetModel(pb.GetModelRequest(model=name)))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_the_model_names_the_defaults_of_its_own() -> None:
    files = model_files(byte_level(), temperature=1.0, top_k=5, max_new_tokens=7, min_p=-1)
    async with (
        FakeCore(files={"tiny": files}) as core,
        running_frontend(core.address) as frontend,
        client_of(frontend) as client,
    ):
        await model_ready(frontend)
        response = await client.GetModel(pb.GetModelRequest())
        assert response.model.generation_defaults == ["temperature", "top_k"]


@pytest.mark.parametrize("name", ["x" * 100_000, "\u8a9e" * 5_000])
async def test_what_is_asked_for_by_a_long_name_is_not_there(ready: Served, name: str) -> None:
    """Rather than that the answer is too long."""
    for call in (
        ready.client.GetModel(pb.GetModelRequest(model=name)),
        ready.client.Abort(pb.AbortRequest(request_id=name)),
        ready.client.Generate(generate_request([5], model=name)),
    ):
        assert (await error_of(call)).code() is grpc.StatusCode.NOT_FOUND


async def test_the_status_is_the_cores(ready: Served) -> None:
    response = await ready.client.GetStatus(pb.GetStatusRequest())
    assert response.status.num_running == 7
    assert list(response.status.models) == ["tiny"]


async def test_the_core_is_told_in_what_detail(ready: Served) -> None:
    detail = status_pb2.StatusDetail(include_requests=True, max_requests=9)
    response = await ready.client.GetStatus(pb.GetStatusRequest(detail=detail))
    assert [request.num_prompt_tokens for request in response.status.requests] == [9]


async def test_the_watched_status_is_the_cores_until_it_goes(ready: Served) -> None:
    call = ready.client.WatchStatus(pb.WatchStatusRequest(interval_ms=250))
    responses, error = await read_until_error(call)
    seen = [(response.status.num_running, response.status.num_waiting) for response in responses]
    assert seen == [(0, 250), (1, 250), (2, 250)]
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_core_what_cannot_wait_is_unavailable() -> None:
    async with running_frontend("127.0.0.1:1") as frontend, client_of(frontend) as client:
        for call in (
            client.GetModel(pb.GetModelRequest()),
            client.Tokenize(pb.TokenizeRequest(text="a")),
            client.Detokenize(pb.DetokenizeRequest()),
            client.GetStatus(pb.GetStatusRequest()),
            client.WatchStatus(pb.WatchStatusRequest()),
            client.Abort(pb.AbortRequest(request_id="r")),
        ):
            assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_model_without_a_tokenizer_takes_token_ids_and_refuses_text() -> None:
    async with (
        FakeCore(files={"tiny": model_files(None)}) as core,
        running_frontend(core.address) as frontend,
        client_of(frontend) as client,
    ):
        call = client.Generate(generate_request([5, 6], logprobs=None))
        await (await core.next_request()).complete([70, 71])
        responses = await read_all(call)
        assert tokens_of(responses) == [70, 71]
        assert text_of(responses) == ""
        for refused in (
            client.Generate(generate_request("text")),
            client.Generate(generate_request([5], stop=["x"])),
            client.Tokenize(pb.TokenizeRequest(text="a")),
            client.Detokenize(pb.DetokenizeRequest(token_ids=[5])),
        ):
            error = await error_of(refused)
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert error_info(error).reason == "NO_TOKENIZER"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_health_and_reflection_are_served(ready: Served, version: str) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    async with grpc.aio.insecure_channel(ready.frontend.runner.address) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    names = {service.name for service in answer.list_services_response.service}
    assert {
        "pagewire.v1.InferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
    } <= names
