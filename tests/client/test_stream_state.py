"""What a stream's responses add up to does not depend on how they were cut."""

from itertools import pairwise

import pytest

from pagewire.v1 import inference_service_pb2 as pb
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
