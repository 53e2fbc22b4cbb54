"""A stream that was cut off goes on elsewhere as if it had not been."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input.processor import resolve_request
from scheduler_service.frontend.models.frontend_model import build_model
from scheduler_service.frontend.requests.choice_stream import ChoiceStream
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import model_info
from tests.support.frontends import generate_request, read_all, text_of, tokens_of
from tests.support.tokenizers import byte_level, model_files, sentencepiece, tokens

MODELS = [
    build_model(model_info(), model_files(tokenizer))
    for tokenizer in (byte_level(), sentencepiece())
]


def new_choice(model: Any, **fields: Any) -> ChoiceStream:
    request = resolve_request(generate_request([5], **fields), "r", model)
    return ChoiceStream(0, request)


def finished() -> scheduler_pb.ChoiceFinished:
    return scheduler_pb.ChoiceFinished(reason=pb.FINISH_REASON_LENGTH)


def play(choice: ChoiceStream, ids: list[int]) -> list[pb.ChoiceDelta]:
    """A delta per token, then the end."""
    deltas = []
    for token_id in ids:
        choice.received_token_ids.append(token_id)
        choice.advance()
        if choice.has_output:
            deltas += choice.take(1000, 0)
    choice.receive_finish(finished())
    choice.advance()
    if choice.has_output:
        deltas += choice.take(1000, 0)
    return deltas


def joined(deltas: list[pb.ChoiceDelta]) -> tuple[str, list[int], str]:
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    end = deltas[-1] if deltas else pb.ChoiceDelta()
    return "".join(delta.text for delta in deltas), ids, f"{end.finish_reason} {end.stop_string}"


@given(
    st.sampled_from(MODELS),
    st.lists(st.integers(3, 390), min_size=1, max_size=30),
    st.lists(st.text("aeh o", min_size=1, max_size=3), max_size=3),
    st.integers(0, 5),
    st.data(),
)
def test_what_was_received_and_what_comes_after_make_the_undisturbed_answer(
    model: Any, ids: list[int], stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    fields = {"stop": stop, "min_tokens": min_tokens, "max_tokens": len(ids)}
    whole = play(new_choice(model, **fields), ids)
    num_received = data.draw(st.integers(0, len(whole)))
    received_text, received_ids, _ = joined(whole[:num_received])
    resumed = new_choice(model, **fields)
    resumed.restore(
        pb.ResumedChoice(token_ids=received_ids, num_chars=len(received_text)), "resume[0]"
    )
    rest = resumed.take(1000, 0) if resumed.has_output else []
    rest += play(resumed, ids[len(received_ids) :])
    text, token_ids, end = joined(rest)
    whole_text, whole_ids, whole_end = joined(whole)
    assert received_text + text == whole_text
    assert received_ids + token_ids == whole_ids
    if num_received < len(whole):
        assert end == whole_end


async def test_a_resumed_request_goes_on_where_its_client_was(served: Served) -> None:
    ids = tokens("hello world fox")
    first = pb.ResumedChoice(index=0, token_ids=ids[:3], num_chars=2)
    call = served.client.Generate(
        generate_request("a", request_id="r", seed=3, n=2, resume=[first])
    )
    request = await served.core.next_request()
    assert request.generated(0) == ids[:3]
    assert request.generated(1) == []
    await request.accept()
    await request.send_tokens(ids[3:], 0)
    await request.send_tokens(ids, 1)
    await request.finish_choice(0)
    await request.finish_choice(1)
    await request.finish()
    responses = await read_all(call)
    assert responses[0].started.seed == 3
    assert text_of(responses, 0) == "hello world fox"[2:]
    assert tokens_of(responses, 0) == ids[3:]
    assert text_of(responses, 1) == "hello world fox"
    assert responses[-1].usage.completion_tokens == 2 * len(ids)


async def test_a_choice_that_had_ended_is_told_again_to_client_and_core(served: Served) -> None:
    ids = tokens("ab")
    choice = pb.ResumedChoice(index=0, token_ids=ids, num_chars=2)
    call = served.client.Generate(
        generate_request("a", request_id="r", seed=3, max_tokens=len(ids), resume=[choice])
    )
    request = await served.core.next_request()
    assert request.submit.generation.generated[0].finished
    await request.accept()
    await request.finish()
    responses = await read_all(call)
    deltas = [delta for response in responses for delta in response.choices]
    assert [delta.finish_reason for delta in deltas] == [pb.FINISH_REASON_LENGTH]
    assert text_of(responses) == ""


@pytest.mark.parametrize(
    ("resumed", "fields", "path"),
    [
        ({"token_ids": [70], "num_chars": 9}, {}, "num_chars"),
        ({"num_chars": 1}, {}, "num_chars"),
        ({"token_ids": [70, 71, 72]}, {"max_tokens": 2}, "token_ids"),
        ({"token_ids": [70, 71, 72]}, {"stop_token_ids": [71]}, "token_ids"),
    ],
)
def test_what_cannot_have_been_received_is_refused(resumed: Any, fields: Any, path: str) -> None:
    choice = new_choice(MODELS[0], **fields)
    with pytest.raises(InvalidArgument) as caught:
        choice.restore(pb.ResumedChoice(**resumed), "resume[0]")
    assert caught.value.field == f"resume[0].{path}"
