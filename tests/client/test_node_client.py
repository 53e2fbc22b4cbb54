"""The client in another language speaks the same contract."""

import json
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.support.fake_frontend import (
    DRAWN_SEED,
    MODEL,
    UNAVAILABLE,
    Break,
    Failure,
    FakeFrontend,
    piece,
    token,
)

NODE_CLIENT = Path(__file__).parents[2] / "client/node"


def run_node(*arguments: str) -> "subprocess.CompletedProcess[str]":
    assert (NODE_CLIENT / "node_modules").is_dir(), "run `npm ci` in client/node first"
    command = ["node", "examples/generate.js", *arguments]
    return subprocess.run(command, cwd=NODE_CLIENT, capture_output=True, text=True, timeout=60)


def test_an_answer_streams_to_standard_output(frontend: FakeFrontend) -> None:
    run = run_node("--address", frontend.address, "--max-tokens", "5", "--seed", "9", "Hello")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "".join(piece(token("Hello", 9, 0, p)) for p in range(5)) + "\n"
    assert len(frontend.requests) == 1


def test_a_whole_answer_has_everything(frontend: FakeFrontend) -> None:
    run = run_node("--address", frontend.address, "--max-tokens", "3", "--json", "Hello")
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    tokens = [token("Hello", DRAWN_SEED, 0, position) for position in range(3)]
    assert answer["outputs"] == [
        {
            "index": 0,
            "text": "".join(map(piece, tokens)),
            "tokenIds": tokens,
            "finishReason": "length",
        }
    ]
    assert answer["model"] == MODEL
    assert answer["seed"] == str(DRAWN_SEED), "no digit is lost to a floating-point number"
    assert answer["usage"]["completionTokens"] == 3
    assert answer["promptTokenIds"] == [ord(character) for character in "Hello"]


def test_a_chat_message_and_a_token_are_sent(frontend: FakeFrontend) -> None:
    run = run_node("--address", frontend.address, "--chat", "--api-key", "secret", "Hi")
    assert run.returncode == 0, run.stderr
    messages = frontend.requests[0].chat.messages
    assert [(message.role, message.content) for message in messages] == [("user", "Hi")]
    assert not frontend.requests[0].sampling_params.HasField("temperature")
    assert frontend.metadata[0]["authorization"] == "Bearer secret"


def whole_text(seed: int, num_tokens: int) -> str:
    return "".join(piece(token("Hello", seed, 0, position)) for position in range(num_tokens))


@pytest.mark.parametrize("failure", [UNAVAILABLE, None])
@pytest.mark.parametrize("after_tokens", [0, 3])
def test_a_stream_that_breaks_goes_on_where_it_was(
    frontend: FakeFrontend, failure: Failure | None, after_tokens: int
) -> None:
    frontend.breaks.append(Break(after_tokens=after_tokens, failure=failure))
    run = run_node("--address", frontend.address, "--max-tokens", "6", "Hello")
    assert run.returncode == 0, run.stderr
    assert run.stdout == whole_text(DRAWN_SEED, 6) + "\n"
    first, again = frontend.requests
    assert first.request_id == again.request_id != ""
    assert (first.attempt, again.attempt) == (0, 1)
    received = [list(choice.token_ids) for choice in again.resume]
    expected = [token("Hello", DRAWN_SEED, 0, position) for position in range(after_tokens)]
    assert received == ([expected] if expected else [])


def test_a_stream_goes_on_through_another_frontend(frontend: FakeFrontend) -> None:
    with FakeFrontend() as other:
        frontend.breaks.append(Break(after_tokens=2, failure=UNAVAILABLE))
        addresses = f"{frontend.address},{other.address}"
        run = run_node("--address", addresses, "--max-tokens", "6", "--json", "Hello")
        assert run.returncode == 0, run.stderr
        (choice,) = json.loads(run.stdout)["outputs"]
        assert choice["text"] == whole_text(DRAWN_SEED, 6)
        assert choice["finishReason"] == "length"
        assert len(frontend.requests) == len(other.requests) == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure(code=grpc.StatusCode.INVALID_ARGUMENT, message="too hot"), "error: too hot"),
        (None, "error: the stream ended before the answer was complete"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    frontend: FakeFrontend, failure: Failure | None, words: str
) -> None:
    frontend.breaks.append(Break(after_tokens=1, failure=failure))
    run = run_node("--address", frontend.address, "--recovery-timeout", "0", "Hello")
    assert run.returncode == 1
    assert run.stderr.strip() == words


def test_a_timeout_ends_the_request(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    run = run_node("--address", frontend.address, "--timeout", "0.5", "Hello")
    assert run.returncode == 1
    assert "eadline" in run.stderr
    assert frontend.ended_early.wait(5)
