"""Many requests on one stream."""

from typing import Any

import grpc
import pytest

from pagewire_client import NO_RETRIES, BatchProgress, PagewireError, SamplingParams, errors
from pagewire_client.requests import MAX_HOLD_MS
from tests.support.fake_frontend import Break, Failure, FakeFrontend

KILLED = Failure(code=grpc.StatusCode.UNAVAILABLE, reason="", message="Socket closed")
TEN = SamplingParams(max_tokens=10)
PROMPTS = [f"prompt {number}" for number in range(20)]


def test_answers_come_in_the_order_of_the_prompts(client: Any, frontend: FakeFrontend) -> None:
    params = [SamplingParams(max_tokens=1 + number % 7) for number in range(20)]
    outputs = client.generate_many(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        1 + number % 7 for number in range(20)
    ]
    assert outputs[3].text == client.generate(PROMPTS[3], params[3]).text
    assert frontend.num_streams == 1


def test_the_tokens_of_whole_answers_may_come_in_few_messages(
    client: Any, frontend: FakeFrontend
) -> None:
    client.generate_many(PROMPTS[:2], TEN)
    client.generate(PROMPTS[2], TEN)
    list(client.stream(PROMPTS[3], TEN))
    holds = [request.max_hold_ms for request in frontend.requests]
    assert holds == [MAX_HOLD_MS, MAX_HOLD_MS, MAX_HOLD_MS, 0]


def test_no_prompts_need_no_server(make_client: Any) -> None:
    assert make_client("127.0.0.1:1").generate_many([]) == []


@pytest.mark.parametrize("after_tokens", [0, 1, 57, 199])
@pytest.mark.parametrize("failure", [KILLED, None])
def test_a_broken_stream_goes_on_and_ends_as_if_undisturbed(
    client: Any, frontend: FakeFrontend, after_tokens: int, failure: Failure | None
) -> None:
    undisturbed = client.generate_many(PROMPTS, TEN)
    frontend.breaks.append(Break(after_tokens=after_tokens, failure=failure))
    outputs = client.generate_many(PROMPTS, TEN)
    assert [output.outputs for output in outputs] == [output.outputs for output in undisturbed]
    assert frontend.num_streams == 3


def test_no_more_than_the_window_is_in_flight(client: Any, frontend: FakeFrontend) -> None:
    frontend.capacity = 4
    client.generate_many(PROMPTS, TEN, max_in_flight=4)
    assert len(frontend.requests) == 20, "none was refused"


@pytest.mark.parametrize("number", [0, -1])
def test_at_least_one_request_must_be_in_flight(client: Any, number: int) -> None:
    with pytest.raises(ValueError, match=f"max_in_flight: expected at least 1, got {number}"):
        client.generate_many(PROMPTS, TEN, max_in_flight=number, timeout=5)


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_full_server_gets_the_rest_later(
    client: Any, frontend: FakeFrontend, capacity: int
) -> None:
    frontend.capacity = capacity
    outputs = client.generate_many(PROMPTS, TEN)
    assert [output.prompt for output in outputs] == PROMPTS
    assert len(frontend.requests) > 20, "some were refused"


def test_one_failed_request_raises(client: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"^prompts\[1\]: .*expected a text") as caught:
        client.generate_many(["good", "", "good too"], TEN)
    assert caught.value.field == "text"


def test_or_stands_in_its_place_if_the_caller_prefers(client: Any) -> None:
    outcomes = client.try_generate_many(["good", "", "good too"], TEN)
    assert [isinstance(outcome, PagewireError) for outcome in outcomes] == [False, True, False]
    assert outcomes[1].message.startswith("prompts[1]: ")
    assert outcomes[2].finished


def test_a_lost_server_fails_what_is_left(make_client: Any, frontend: FakeFrontend) -> None:
    frontend.breaks.append(Break(after_tokens=30, failure=KILLED))
    client = make_client(frontend.address, retry=NO_RETRIES)
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=100)]
    done, lost = client.try_generate_many(["one", "two"], params)
    assert done.finished
    assert isinstance(lost, errors.Unavailable)


def test_a_timeout_bounds_the_whole_batch(client: Any, frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    with pytest.raises(errors.DeadlineExceeded):
        client.generate_many(PROMPTS, TEN, timeout=0.3)


def test_progress_is_told(client: Any) -> None:
    seen: list[BatchProgress] = []
    client.generate_many(["ab", "cde"], TEN, on_progress=seen.append)
    assert seen[-1] == BatchProgress(
        num_requests=2, num_finished=2, num_prompt_tokens=5, num_generated_tokens=20
    )
    generated = [progress.num_generated_tokens for progress in seen]
    assert generated == sorted(generated)
