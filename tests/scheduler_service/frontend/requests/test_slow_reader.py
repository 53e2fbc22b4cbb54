"""A client that does not read costs no more than its tokens and gets them in few messages."""

import struct

from pagewire.columns import pack
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.frontend.input.processor import resolve_request
from scheduler_service.frontend.models.frontend_model import build_model
from scheduler_service.frontend.requests import output_assembler
from scheduler_service.frontend.requests.request_stream import RequestStream
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import (
    client_of,
    generate_request,
    read_all,
    running_frontend,
    text_of,
    tokens_of,
)
from tests.support.tokenizers import byte_level, model_files

MODEL = model_info(max_model_len=1_000_000)
HELLO = byte_level().token_to_id("hello")


def new_stream(**fields: object) -> RequestStream:
    model = build_model(MODEL, model_files(byte_level()))
    stream = RequestStream("r", None, lambda: None, "")
    stream.begin(resolve_request(generate_request([5], **fields), "r", model))
    stream.receive_accepted()
    return stream


def receive(stream: RequestStream, ids: list[int], choice: int = 0) -> None:
    for token_id in ids:
        stream.choices[choice].received_token_ids.append(token_id)
    stream.advance()


def test_everything_that_was_not_taken_comes_in_one_response() -> None:
    stream = new_stream(n=2)
    for _ in range(100):
        receive(stream, [HELLO], 0)
        receive(stream, [HELLO], 1)
    response = stream.take()
    assert response is not None
    assert response.HasField("started")
    assert [(delta.index, len(delta.token_ids)) for delta in response.choices] == [
        (0, 100),
        (1, 100),
    ]
    assert response.choices[0].text == "hello" * 100
    assert stream.take() is None


def test_a_response_has_a_largest_size_when_log_probabilities_were_asked_for(
    monkeypatch: object,
) -> None:
    most = output_assembler.MAX_LOGPROBS_PER_RESPONSE // 21
    num_tokens = 2 * most + 1
    stream = new_stream(logprobs=20)
    for _ in range(num_tokens):
        stream.choices[0].received_token_ids.append(HELLO)
        stream.choices[0].received_logprobs.append(
            scheduler_pb.ChoiceLogprobs(
                token_ids=pack([HELLO] * 21), logprobs=struct.pack("<21f", *[-1.0] * 21)
            )
        )
    stream.choices[0].receive_finish(scheduler_pb.ChoiceFinished())
    stream.advance()
    stream.receive_finished(scheduler_pb.RequestFinished())
    responses = []
    while (response := stream.take()) is not None:
        responses.append(response)
    assert [len(tokens_of([response])) for response in responses] == [most, most, 1]
    assert all(text_of([response]) for response in responses)  # each with that of its tokens
    assert max(response.ByteSize() for response in responses) < 2 << 20
    assert [response.HasField("usage") for response in responses] == [False, False, True]


async def test_a_client_that_does_not_read_gets_merged_messages_when_it_does(
    served: Served,
) -> None:
    num_steps, tokens_per_step = 400, 50
    async with (
        FakeCore(models=[MODEL]) as core,
        running_frontend(core.address) as frontend,
        client_of(frontend, ("grpc.http2.bdp_probe", 0)) as client,
    ):
        slow = client.Generate(generate_request([5]))
        request = await core.next_request()
        await request.accept()
        await slow.read()
        for _ in range(num_steps):
            await request.send_tokens([HELLO] * tokens_per_step)
        # Another request on the same stream to the core: when it is done, all of that arrived.
        async with client_of(frontend) as other:
            quick = other.Generate(generate_request([5]))
            await (await core.next_request()).complete([HELLO])
            assert text_of(await read_all(quick)) == "hello"
        await request.finish_choice()
        await request.finish()
        responses = await read_all(slow)
    assert tokens_of(responses) == [HELLO] * num_steps * tokens_per_step
    assert text_of(responses) == "hello" * num_steps * tokens_per_step
    assert len(responses) < num_steps
