"""The client in another language speaks the same contract."""

import json
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.support.fake_frontend import (
    DRAWN_SEED,
    MODEL,
    STOP_TOKEN,
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
            "reasoning": "",
            "toolCalls": [],
            "tokenIds": tokens,
            "logprobs": [],
            "cumulativeLogprob": None,
            "finishReason": "length",
            "stopReason": None,
        }
    ]
    assert answer["promptLogprobs"] == []
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
    assert frontend.ended_early.wait(60)


@pytest.mark.parametrize(
    ("failure", "absence"),
    [
        (Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_ms=20), "full"),
        (Failure(code=grpc.StatusCode.UNAVAILABLE, reason="SHUTTING_DOWN"), "shutting down"),
        (Failure(code=grpc.StatusCode.UNAVAILABLE, reason="", message="Socket closed"), "gone"),
    ],
)
def test_a_request_that_has_not_begun_is_tried_by_time_once_a_server_was_reached(
    frontend: FakeFrontend, failure: Failure, absence: str
) -> None:
    frontend.breaks.extend(Break(failure=failure) for _ in range(6))
    run = run_node("--address", frontend.address, "--max-tokens", "3", "Hello")
    assert run.returncode == 0, run.stderr
    assert [request.attempt for request in frontend.requests] == list(range(7)), absence


def test_a_server_that_cannot_serve_the_request_is_tried_by_count(frontend: FakeFrontend) -> None:
    no_model = Failure(
        code=grpc.StatusCode.UNAVAILABLE, reason="NO_MODEL_SERVED", message="no model is served"
    )
    frontend.breaks.extend(Break(failure=no_model) for _ in range(10))
    run = run_node("--address", frontend.address, "--max-tokens", "3", "Hello")
    assert run.returncode == 1
    assert run.stderr.strip() == "error: no model is served"
    assert len(frontend.requests) == 6


def test_a_server_that_was_never_there_is_an_error_that_names_it() -> None:
    run = run_node("--address", "127.0.0.1:1", "Hello")
    assert run.returncode == 1
    assert run.stderr == "error: no server answers: connect ECONNREFUSED 127.0.0.1:1\n"


OPEN_REQUESTS = """
import assert from "node:assert";
import { OpenRequests } from "./src/open-requests.js";

const open = new OpenRequests(2);
const enter = (deadline = Infinity) => open.enter(deadline);
const connections = await Promise.all(Array.from({ length: 2000 }, () => enter()));
assert.deepStrictEqual([0, 999, 1000, 1999].map((index) => connections[index]), [0, 0, 1, 1]);
const order = [];
const waiting = ["first", "second"].map((name) => enter().then(() => order.push(name)));
await assert.rejects(enter(performance.now() + 20), /maximum of open requests/);
assert.deepStrictEqual(order, []);
open.leave(1);
await waiting[0];
assert.deepStrictEqual(order, ["first"]);
open.leave(0);
await waiting[1];
open.leave(0);
assert.strictEqual(await enter(), 0);
"""


WRONG_ARGUMENTS = """
import assert from "node:assert";
import { Client } from "./src/client.js";

const client = new Client("127.0.0.1:1");
const names = (message) => (error) => error instanceof TypeError && error.message.includes(message);
const refuses = (message, ...args) => assert.rejects(client.generate(...args), names(message));
const params = (message, samplingParams) => refuses(message, "Hello", samplingParams);
await params("samplingParams.maxtokens: no such field; there are n, bestOf,", { maxtokens: 5 });
await params("samplingParams.maxTokens: expected an integer from 0 to 4294967295, got -1", {
  maxTokens: -1,
});
await params("samplingParams.maxTokens: expected an integer", { maxTokens: 1.5 });
await params("samplingParams.temperature: expected a number, got", { temperature: "hot" });
await params("samplingParams.stop: expected an array, got \\"x\\"", { stop: "x" });
await params("samplingParams.stop[1]: expected a string, got 5", { stop: ["x", 5] });
await params("samplingParams.seed: expected an integer from -9223372036854775808", { seed: "x" });
await params("samplingParams.ignoreEos: expected a boolean, got 1", { ignoreEos: 1 });
await params("samplingParams.beamSearch.widht: no such field", { beamSearch: { widht: 2 } });
await params("samplingParams.beamSearch.earlyStopping: expected one of EARLY", {
  beamSearch: { earlyStopping: "never" },
});
await params("samplingParams: expected an object, got 5", 5);
await refuses("chat.messages[0].contents: no such field", [{ role: "user", contents: "x" }]);
await refuses("chat.tool: no such field", { messages: [], tool: [] });
await refuses("tokenIds.ids[0]: expected an integer from 0", [-1]);
await refuses("options.signal: expected an AbortSignal", "Hello", {}, { signal: 5 });
await assert.rejects(
  client.stream("Hello", { promptLogprobs: 1 }).next(),
  names("samplingParams.promptLogprobs: only whole answers have them: use generate"),
);
await refuses("options.timeout: no such field; there are model,", "Hello", {}, { timeout: 1 });
for (const timeoutMs of [NaN, 0, -1, "5"]) {
  await refuses("options.timeoutMs: expected a number above 0, got", "Hello", {}, { timeoutMs });
}
const creates = (message, ...args) => assert.throws(() => new Client(...args), names(message));
for (const address of ["", [], "host", "http://host:1", "host:x", 5]) {
  creates("address: expected HOST:PORT or unix:PATH, got", address);
}
creates("options.apikey: no such field", "host:1", { apikey: "x" });
creates("options.maxConnections: expected a number of at least 1", "host:1", { maxConnections: 0 });
creates("options.recoveryTimeoutMs: expected a number of at least 0, got NaN", "host:1", {
  recoveryTimeoutMs: NaN,
});
"""


LOGPROBS = """
import assert from "node:assert";
import { Client } from "./src/client.js";

const client = new Client(process.argv[1]);
const ofEach = (list) => list.map(({ tokenId, logprob, rank }) => [tokenId, logprob, rank]);
const params = { maxTokens: 4, logprobs: 1, promptLogprobs: 1, stopTokenIds: [STOP_TOKEN] };
const { promptTokenIds, promptLogprobs, outputs } = await client.generate("Hello", params);
const others = promptTokenIds.slice(1).map((id) => [id, -id / 1024, 2]);
assert.deepStrictEqual(ofEach(promptLogprobs), [[promptTokenIds[0], null, 0], ...others]);
const [output] = outputs;
assert.deepStrictEqual(ofEach(output.logprobs), output.tokenIds.map((id) => [id, -id / 1024, 2]));
const [best] = output.logprobs[0].top;
assert.deepStrictEqual([best.tokenId, best.rank, best.logprob < 0], [3, 1, true]);
const sum = output.logprobs.reduce((sum, { logprob }) => sum + logprob, 0);
assert.ok(Math.abs(output.cumulativeLogprob - sum) < 1e-6);
assert.deepStrictEqual([output.finishReason, output.stopReason], ["stop", STOP_TOKEN]);
const inStream = [];
for await (const { logprobs } of client.stream("Hello", { ...params, promptLogprobs: undefined })) {
  inStream.push(...logprobs);
}
assert.strictEqual(inStream.length, 4);
client.close();
"""


ABORTED = """
import assert from "node:assert";
import { Client } from "./src/client.js";
import { OpenRequests } from "./src/open-requests.js";

const client = new Client(process.argv[1]);
const controller = new AbortController();
const { signal } = controller;
const stopped = (error) => error === signal.reason;
const read = async () => {
  for await (const { text } of client.stream("Hello", { maxTokens: 9 }, { signal })) {
    if (text) controller.abort(new Error("stop"));
  }
};
await assert.rejects(read(), stopped);
await assert.rejects(client.generate("Hello", {}, { signal }), stopped);
client.close();

const open = new OpenRequests(1);
for (let number = 0; number < 1000; number += 1) open.enter(Infinity);
const other = new AbortController();
const waits = open.enter(Infinity, other.signal);
other.abort();
await assert.rejects(waits, { name: "AbortError" });
open.leave(0);
assert.strictEqual(open.enter(Infinity), 0);

const away = new Client("127.0.0.1:1");
const brief = { signal: AbortSignal.timeout(50) };
await assert.rejects(away.generate("Hello", {}, brief), { name: "TimeoutError" });
"""


def run_script(script: str, *arguments: str) -> None:
    command = ["node", "--input-type=module", "--eval", script, *arguments]
    run = subprocess.run(command, cwd=NODE_CLIENT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_arguments_that_no_message_can_hold_are_named() -> None:
    run_script(WRONG_ARGUMENTS)


def test_log_probabilities_and_the_reason_of_a_stop_are_in_answers(frontend: FakeFrontend) -> None:
    run_script(LOGPROBS.replace("STOP_TOKEN", str(STOP_TOKEN)), frontend.address)


def test_a_signal_ends_a_request_wherever_it_is(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    run_script(ABORTED, frontend.address)
    assert frontend.ended_early.wait(60)


def test_a_timeout_of_ages_is_no_deadline(frontend: FakeFrontend) -> None:
    run = run_node("--address", frontend.address, "--timeout", "1e15", "--max-tokens", "2", "Hello")
    assert run.returncode == 0, run.stderr


def test_a_wrong_argument_of_the_example_is_one_line() -> None:
    run = run_node("--address", "nowhere", "Hello")
    assert run.returncode == 1
    assert run.stderr == 'error: address: expected HOST:PORT or unix:PATH, got "nowhere"\n'


def test_requests_beyond_what_the_connections_carry_wait_in_order() -> None:
    run_script(OPEN_REQUESTS)


def test_many_requests_at_once_all_end(frontend: FakeFrontend) -> None:
    run = subprocess.run(
        ["node", "examples/many.js", "--address", frontend.address, "--requests", "1500"],
        cwd=NODE_CLIENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["requests"], result["failed"]) == (1500, 0), result["error"]
    assert len({request.request_id for request in frontend.requests}) == 1500
