"""A frontend is killed while a model thinks, and while it writes a call: every client gets the
reasoning, the text and the calls that it would have had."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagewire_client import Client, RequestOutput
from tests.client.test_node_client import NODE_CLIENT
from tests.support.cluster import Cluster
from tests.support.scripted_checkpoint import make_scripted_checkpoint
from tests.support.worker_flags import FLOAT32

NUMBERS = [f" {number}" for number in range(400)]
CITIES = [f'"city {number}", ' for number in range(200)]
PIECES = [
    *("<think>", *NUMBERS, "</think>", "It is sunny."),
    *("<tool_call>", '{"name": "go", "arguments": {"to": [', *CITIES, "0]}}", "</tool_call>"),
    *("<tool_call>\n", '{"name": "stay", "arguments": {}}', "</tool_call>\n"),
]
THOUGHT, ARGUMENTS = "".join(NUMBERS), '{"to": [' + "".join(CITIES) + "0]}"
ANSWER = ["It is sunny.", THOUGHT.strip(), [["go", ARGUMENTS], ["stay", "{}"]]]
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("go", "stay")]
PROMPT: dict[str, Any] = {"messages": [{"role": "user", "content": "Where?"}], "tools": TOOLS}
OPTIONS: dict[str, Any] = {"temperature": 0, "seed": 7, "logprobs": 1, "max_tokens": 1000}
MOMENTS = {"thought": 30, "call": 450}
"""Number of tokens received, when the frontend is killed."""

NODE_PROGRAM = """
import { Client } from "./src/client.js";
const [addresses, begun] = process.argv.slice(1);
const client = new Client(addresses);
const messages = [{ role: "user", content: "Where?" }];
const prompt = { messages, tools: [{ name: "go" }, { name: "stay" }] };
let numTokens = 0, text = "", reasoning = "", ids = [];
const calls = [];
for await (const delta of client.stream(prompt, { temperature: 0, maxTokens: 1000 })) {
  numTokens += delta.tokenIds.length;
  text += delta.text;
  reasoning += delta.reasoning;
  for (const call of delta.toolCalls) {
    if (call.id) { calls.push([call.name, ""]); ids.push(call.id); }
    calls[call.index][1] += call.arguments;
  }
  if (numTokens > Number(begun)) console.error("begun");
}
console.log(JSON.stringify([text, reasoning.trim(), calls]));
client.close();
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    special = ["<think>", "</think>"]
    return str(make_scripted_checkpoint(folder / "model", PIECES, special=special))


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("victims")
    with Cluster(folder, model=model, worker_flags=FLOAT32) as victims:
        yield victims.start(num_frontends=2)


def answer_of(output: RequestOutput) -> list[Any]:
    (choice,) = output.outputs
    assert len({call.id for call in choice.tool_calls}) == 2
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids) == len(PIECES) + 1
    assert output.usage is not None
    assert output.usage.reasoning_tokens == 1 + len(NUMBERS)
    calls = [[call.name, call.arguments] for call in choice.tool_calls]
    return [choice.text, choice.reasoning.strip(), calls]


Began = Callable[[], None]


def with_client(addresses: list[str], num_begun: int, began: Began) -> list[Any]:
    with Client(addresses) as client, client.stream(PROMPT, **OPTIONS) as stream:  # type: ignore[arg-type]
        for _ in stream:
            if len(stream.output.outputs[0].token_ids) > num_begun:
                began()
        return answer_of(stream.output)


def with_node(addresses: list[str], num_begun: int, began: Began) -> list[Any]:
    arguments = ["--input-type=module", "-e", NODE_PROGRAM, ",".join(addresses), str(num_begun)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["node", *arguments], cwd=NODE_CLIENT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in process.stderr:
            began()
        answer: list[Any] = json.loads(process.stdout.read())
    return answer


@pytest.mark.parametrize(("moment", "read"), [("thought", with_client), ("call", with_node)])
def test_reasoning_and_calls_continue_exactly_through_another_frontend(
    victims: Cluster, moment: str, read: Callable[..., list[Any]]
) -> None:
    addresses = [victims.frontend_address(index) for index in range(2)]
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(read, addresses, MOMENTS[moment], begun.set)
        assert begun.wait(60)
        victims.frontends[0].kill()
        assert answer.result(timeout=120) == ANSWER
    victims.restart_frontend(0)
    victims.wait_serving()
