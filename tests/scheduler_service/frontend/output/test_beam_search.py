"""Beam search as a frontend sees it: one answer at the end, whatever happens before."""

import struct

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import sampling_pb2
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeRequest
from tests.support.frontends import (
    generate_request,
    read_all,
    text_of,
)
from tests.support.tokenizers import EOS, byte_level, letters

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
EOS_ID = byte_level().token_to_id(EOS)


async def found(request: FakeRequest, *beams: list[int]) -> None:
    """What a core says at a search's end, in one message."""
    handles = [request.handle + i for i, beam in enumerate(beams) for _ in beam]
    ids = [token_id for beam in beams for token_id in beam]
    await request.attachment.send(
        token_handles=pack(handles),
        token_ids=pack(ids),
        logprobs=[
            scheduler_pb.ChoiceLogprobs(
                handle=handle,
                token_ids=pack([token_id]),
                logprobs=struct.pack("<f", -0.5),
                rank=1,
            )
            for handle, token_id in zip(handles, ids, strict=True)
        ],
        choices_finished=[
            scheduler_pb.ChoiceFinished(
                handle=request.handle + i, reason=STOP if beam[-1] == EOS_ID else LENGTH
            )
            for i, beam in enumerate(beams)
        ],
        requests_finished=[scheduler_pb.RequestFinished(handle=request.handle)],
    )


async def test_the_best_beams_come_at_the_end_in_order(served: Served) -> None:
    beam_search = {"width": 4, "length_penalty": 0.5, "early_stopping": 1}
    call = served.client.Generate(generate_request("x", n=2, beam_search=beam_search, logprobs=0))
    request = await served.core.next_request()
    submitted = request.submit.generation.beam_search
    assert (submitted.width, submitted.length_penalty) == (4, 0.5)
    assert submitted.early_stopping == sampling_pb2.EARLY_STOPPING_WHEN_FULL
    await request.accept()
    assert (await call.read()).HasField("started")
    await found(request, letters("ab"), [*letters("c"), EOS_ID])
    responses = await read_all(call)
    assert [text_of(responses, choice) for choice in range(2)] == ["ab", "c"]
    deltas = [delta for response in responses for delta in response.choices]
    assert [delta.finish_reason for delta in deltas] == [LENGTH, STOP]
    assert [delta.cumulative_logprob for delta in deltas] == [-1.0, -1.0]
    assert responses[-1].usage.completion_tokens == 4


async def test_a_search_is_submitted_again_as_it_was_when_the_core_is_lost(served: Served) -> None:
    call = served.client.Generate(generate_request("x", n=2, beam_search={"width": 2}))
    request = await served.core.next_request()
    await request.accept()
    await call.read()
    request.attachment.break_off()
    again = await served.core.next_request()
    assert again.submit.generation.beam_search == request.submit.generation.beam_search
    assert not again.submit.generation.generated
    await again.accept()
    await found(again, letters("a"), letters("b"))
    responses = await read_all(call)
    assert [text_of(responses, choice) for choice in range(2)] == ["a", "b"]
