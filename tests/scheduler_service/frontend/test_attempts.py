"""A client tries again while its former try is open on the same frontend, or on another."""

from typing import Any

import grpc
import pytest

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.input.processor import fingerprint
from tests.scheduler_service.frontend.conftest import Served
from tests.support.frontends import (
    error_info,
    error_of,
    generate_request,
    read_all,
    text_of,
    tokens_of,
)
from tests.support.tokenizers import letters


async def test_the_later_try_goes_on_and_the_former_ends_with_an_error(served: Served) -> None:
    former = served.client.Generate(generate_request("hello", request_id="r"))
    request = await served.core.next_request()
    await request.accept()
    await request.send_tokens(letters("ab"))
    assert text_of([await former.read(), await former.read()]) == "ab"
    seed = request.submit.generation.sampling.seed
    first = pb.ResumedChoice(token_ids=letters("a"), num_chars=1)
    later = served.client.Generate(
        generate_request("hello", request_id="r", attempt=1, seed=seed, resume=[first])
    )
    error = await error_of(former)
    assert error.code() == grpc.StatusCode.ABORTED
    assert error_info(error).reason == "TAKEN_OVER"
    again = await served.core.next_request()
    assert (again.submit.attempt, again.generated()) == (1, letters("a"))
    assert again.submit.fingerprint == request.submit.fingerprint
    assert again.submit.was_accepted
    assert again.submit.waited_us > 0
    await again.complete(letters("bc"))
    assert tokens_of(await read_all(later)) == letters("bc")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"attempt": 1}, grpc.StatusCode.ALREADY_EXISTS),
        ({"attempt": 0}, grpc.StatusCode.ABORTED),
        ({"attempt": 2, "prompt": "another"}, grpc.StatusCode.ALREADY_EXISTS),
        ({"attempt": 2, "top_k": 5}, grpc.StatusCode.ALREADY_EXISTS),
    ],
)
async def test_what_is_no_later_try_is_refused_and_the_open_one_goes_on(
    served: Served, fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    call = served.client.Generate(generate_request("hello", request_id="r", attempt=1))
    request = await served.core.next_request()
    other = served.client.Generate(generate_request(**{"request_id": "r"} | fields))
    assert (await error_of(other)).code() == code
    await request.complete(letters("ok"))
    assert text_of(await read_all(call)) == "ok"


async def test_a_new_core_hears_what_the_former_one_knew_of_a_request(served: Served) -> None:
    call = served.client.Generate(generate_request("hello"), timeout=30)
    request = await served.core.next_request()
    assert not request.submit.was_accepted
    await request.accept()
    losses = pack([request.handle, request.handle, 999])
    await request.attachment.send(worker_losses=losses)
    await request.send_tokens(letters("a"))
    while not text_of([await call.read()]):
        pass
    request.attachment.break_off()
    again = await served.core.next_request()
    assert again.submit.was_accepted
    assert again.submit.num_worker_losses == 2
    assert again.submit.waited_us > request.submit.waited_us
    assert again.submit.timeout_us < request.submit.timeout_us, "from the first submission on"
    await again.complete(letters("b"))
    await read_all(call)


@pytest.mark.parametrize("is_output_later", [True, False])
async def test_a_new_core_hears_of_deaths_alone_since_the_last_output(
    served: Served, is_output_later: bool
) -> None:
    call = served.client.Generate(generate_request("hello"), timeout=30)
    request = await served.core.next_request()
    await request.accept()
    await request.send_tokens(letters("a"))
    losses = pack([request.handle, 999])
    await request.attachment.send(worker_losses=losses, lone_worker_losses=losses)
    if is_output_later:
        await request.send_tokens(letters("b"))
    other = served.client.Generate(generate_request("later"))
    await (await served.core.next_request()).complete(letters("z"))
    await read_all(other)  # so that the frontend has read what came before
    request.attachment.break_off()
    again = await served.core.next_request()
    assert again.submit.num_lone_worker_losses == (0 if is_output_later else 1)
    assert again.submit.num_worker_losses == 1
    await again.complete(letters("c"))
    await read_all(call)


def test_tries_at_one_request_have_the_same_fingerprint_and_no_others_have() -> None:
    first = pb.GenerateRequest(request_id="r", text="hello")
    again = generate_request("hello", request_id="r", model="m", attempt=3, seed=5, max_hold_ms=9)
    again.resume.add(index=0, token_ids=[1])
    again.priority, again.num_speculative_tokens = 2, 0  # no token depends on these
    assert fingerprint(first) == fingerprint(again)
    prints = {
        fingerprint(request)
        for request in (
            first,
            generate_request("hello!"),
            generate_request([5, 6]),
            generate_request("hello", temperature=0),
            generate_request("hello", stop=["x"]),
        )
    }
    assert len(prints) == 5
    assert {len(print) for print in prints} == {16}
