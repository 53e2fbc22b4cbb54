"""What a stream's responses add up to does not depend on how they were cut."""

from itertools import pairwise

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.outputs import OutputToolCall
from pagewire_client.stream_state import StreamState

LOGPROBS = [-7.7, -1.1e-9, -3.3e-9, -7.3e-10, -0.1, -2.3e-9]
"""So small beside the first that its sum with them is rounded."""


def response(first: int, last: int) -> pb.GenerateResponse:
    """Tokens `first` to `last`, the latter excluded."""
    delta = pb.ChoiceDelta(token_ids=range(first, last))
    for token_id in range(first, last):
        token = pb.TokenLogprob(token_id=token_id, logprob=LOGPROBS[token_id], rank=1)
        delta.logprobs.append(pb.TokenLogprobs(token=token))
    return pb.GenerateResponse(choices=[delta])


@pytest.mark.parametrize("cuts", [[0, 6], [0, 1, 6], [0, 3, 4, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_log_probabilities_add_up_to_the_same_bits_however_they_come(cuts: list[int]) -> None:
    state = StreamState(pb.GenerateRequest(request_id="x"))
    for first, last in pairwise(cuts):
        state.receive(response(first, last))
    expected = 0.0
    for logprob in LOGPROBS:
        expected += pb.TokenLogprob(logprob=logprob).logprob
    assert state.output.outputs[0].cumulative_logprob == expected


def call(index: int, id: str = "", name: str = "", arguments: str = "") -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=index, id=id, name=name, arguments=arguments)


def test_reasoning_and_calls_add_up_and_a_resumed_request_counts_them() -> None:
    state = StreamState(pb.GenerateRequest(request_id="x"))
    state.receive(pb.GenerateResponse(started=pb.Started(seed=1, model="m")))
    deltas = [
        pb.ChoiceDelta(token_ids=[1], reasoning="Hm\N{GRINNING FACE}"),
        pb.ChoiceDelta(token_ids=[2, 3], reasoning=".", text="é", tool_calls=[call(0, "a", "f")]),
        pb.ChoiceDelta(tool_calls=[call(0, arguments='{"é"'), call(1, "b", "g", "{}")]),
        pb.ChoiceDelta(text="!"),
    ]
    received = state.receive(pb.GenerateResponse(choices=deltas))
    (choice,) = state.output.outputs
    assert (choice.reasoning, choice.text) == ("Hm\N{GRINNING FACE}.", "é!")
    assert choice.tool_calls == [
        OutputToolCall(id="a", name="f", arguments='{"é"'),
        OutputToolCall(id="b", name="g", arguments="{}"),
    ]
    assert [delta.reasoning for delta in received] == ["Hm\N{GRINNING FACE}", ".", "", ""]
    assert [[part.name for part in delta.tool_calls] for delta in received] == [
        *([], ["f"]),
        *(["", "g"], []),
    ]
    (resumed,) = state.next_request().resume
    counts = (resumed.num_reasoning_chars, resumed.num_tool_calls, resumed.num_argument_chars)
    assert (resumed.num_chars, *counts) == (2, 4, 2, 6)
    assert choice.message == {
        "role": "assistant",
        "content": "é!",
        "reasoning_content": choice.reasoning,
        "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": '{"é"'}},
            {"id": "b", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
