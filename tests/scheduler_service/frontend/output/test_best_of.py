"""`best_of`: more candidates than choices; the client gets the best when all have ended."""

import struct

import grpc

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeRequest
from tests.support.frontends import (
    bad_field,
    error_of,
    generate_request,
    read_all,
    text_of,
    tokens_of,
)
from tests.support.tokenizers import letters

LENGTH = pb.FINISH_REASON_LENGTH


async def send(request: FakeRequest, choice: int, text: str, *logprobs: float) -> None:
    """Some tokens of a candidate, with their log probabilities."""
    ids = letters(text)
    entries = [
        scheduler_pb.ChoiceLogprobs(
            handle=request.handle + choice,
            token_ids=pack([token_id]),
            logprobs=struct.pack("<f", logprob),
            rank=1,
        )
        for token_id, logprob in zip(ids, logprobs, strict=True)
    ]
    await request.send_tokens(ids, choice, logprobs=entries)


async def finish(request: FakeRequest) -> None:
    for choice in range(request.submit.generation.num_choices):
        await request.finish_choice(choice)
    await request.finish()


async def test_the_most_probable_candidates_are_returned_best_first(served: Served) -> None:
    call = served.client.Generate(generate_request("x", n=2, best_of=4))
    request = await served.core.next_request()
    assert request.submit.generation.num_choices == 4
    await request.accept()
    await send(request, 0, "aa", -1.0, -1.0)
    await send(request, 1, "b", -0.5)
    await send(request, 2, "cccc", -0.25, -0.25, -0.25, -0.5)
    await send(request, 3, "d", -0.5)
    await finish(request)
    responses = await read_all(call)
    assert [text_of(responses, choice) for choice in range(2)] == ["b", "d"]
    assert tokens_of(responses, 0) == letters("b")
    assert responses[-1].usage.completion_tokens == 8, "of all candidates"
    deltas = [delta for response in responses for delta in response.choices]
    assert [delta.index for delta in deltas] == [0, 1]
    assert [delta.finish_reason for delta in deltas] == [LENGTH, LENGTH]
    assert not any(delta.logprobs or delta.HasField("cumulative_logprob") for delta in deltas)


async def test_nothing_of_them_is_told_before_all_have_ended(served: Served) -> None:
    call = served.client.Generate(generate_request("x", best_of=2))
    request = await served.core.next_request()
    await request.accept()
    assert (await call.read()).HasField("started")
    await send(request, 0, "abc", -0.1, -0.1, -0.1)
    await request.finish_choice(0)
    await send(request, 1, "d", -1.0)
    await request.finish_choice(1)
    await request.finish()
    [only] = await read_all(call)
    assert [delta.text for delta in only.choices] == ["abc"]
    assert only.HasField("usage")


async def test_log_probabilities_come_with_them_where_they_are_asked_for(served: Served) -> None:
    call = served.client.Generate(generate_request("x", best_of=2, logprobs=0))
    request = await served.core.next_request()
    await request.accept()
    await send(request, 0, "ab", -3.0, -1.0)
    await send(request, 1, "cd", -0.5, -0.25)
    await finish(request)
    deltas = [delta for response in await read_all(call) for delta in response.choices]
    [delta] = deltas
    assert [entry.token.logprob for entry in delta.logprobs] == [-0.5, -0.25]
    assert delta.cumulative_logprob == -0.75


async def test_a_stop_string_ends_a_candidate_and_what_follows_does_not_count(
    served: Served,
) -> None:
    call = served.client.Generate(generate_request("x", best_of=2, stop=["!"]))
    request = await served.core.next_request()
    await request.accept()
    await send(request, 0, "a!zz", -0.5, -0.5, -9.0, -9.0)
    await send(request, 1, "bb", -1.0, -1.0)
    await request.finish_choice(1)
    await request.finish()
    responses = await read_all(call)
    assert text_of(responses) == "a"
    assert [d.stop_string for r in responses for d in r.choices] == ["!"]


async def test_candidates_go_on_when_the_core_is_replaced(served: Served) -> None:
    call = served.client.Generate(generate_request("x", best_of=2, seed=3))
    request = await served.core.next_request()
    await request.accept()
    await send(request, 0, "a", -0.5)
    await send(request, 1, "b", -4.0)
    await call.read()
    request.attachment.break_off()
    again = await served.core.next_request()
    await again.accept()
    assert [again.generated(choice) for choice in range(2)] == [letters("a"), letters("b")]
    await send(again, 0, "y", -0.5)
    await send(again, 1, "z", -0.125)
    await finish(again)
    assert text_of(await read_all(call)) == "ay"


async def test_a_client_that_lost_its_frontend_gets_the_rest(served: Served) -> None:
    resumed = [
        pb.ResumedChoice(index=0, token_ids=letters("bcd"), num_chars=3),
        pb.ResumedChoice(index=1, token_ids=letters("a"), num_chars=1),
    ]
    call = served.client.Generate(
        generate_request("x", n=2, best_of=3, seed=3, request_id="r", resume=resumed)
    )
    request = await served.core.next_request()
    assert not request.submit.generation.generated
    await request.accept()
    await send(request, 0, "aa", -1.0, -1.0)
    await send(request, 1, "bcd", -0.5, -0.5, -0.5)
    await send(request, 2, "e", -5.0)
    await finish(request)
    responses = await read_all(call)
    assert [text_of(responses, choice) for choice in range(2)] == ["", "a"]
    assert [tokens_of(responses, choice) for choice in range(2)] == [[], letters("a")]
    ends = {d.index: d.finish_reason for r in responses for d in r.choices if d.finish_reason}
    assert ends == {0: LENGTH, 1: LENGTH}


async def test_tokens_of_another_request_cannot_be_resumed(served: Served) -> None:
    resumed = [pb.ResumedChoice(index=0, token_ids=letters("q"), num_chars=1)]
    call = served.client.Generate(
        generate_request("x", best_of=2, seed=3, request_id="r", resume=resumed)
    )
    request = await served.core.next_request()
    await request.accept()
    await send(request, 0, "a", -1.0)
    await send(request, 1, "b", -2.0)
    await finish(request)
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_field(error) == "resume[0].token_ids"
