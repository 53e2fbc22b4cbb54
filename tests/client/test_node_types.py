"""The Node client's types: TypeScript takes what is right, by the names of the protos."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from pagewire.v1 import inference_service_pb2, sampling_pb2

NODE_CLIENT = Path(__file__).parents[2] / "client/node"


def check(folder: Path) -> "subprocess.CompletedProcess[str]":
    compiler = NODE_CLIENT / "node_modules/.bin/tsc"
    assert compiler.exists(), "run `npm ci` in client/node first"
    command = [str(compiler), "--project", str(folder), "--pretty", "false"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_program_with_types_compiles_and_mistakes_do_not() -> None:
    run = check(NODE_CLIENT)
    assert (run.returncode, run.stdout) == (0, "")


def declared(interface: str) -> list[str]:
    """The names of its members, in their order."""
    types = (NODE_CLIENT / "src/client.d.ts").read_text()
    found = re.search(rf"^export interface {interface} {{\n(.*?)^}}", types, re.M | re.S)
    assert found is not None
    return re.findall(r"^  (\w+)\??:", found[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("SamplingParams", sampling_pb2.SamplingParams.DESCRIPTOR),
        ("Chat", inference_service_pb2.Chat.DESCRIPTOR),
        ("ChatMessage", inference_service_pb2.ChatMessage.DESCRIPTOR),
        ("Tool", inference_service_pb2.Tool.DESCRIPTOR),
        ("ToolCall", inference_service_pb2.ToolCall.DESCRIPTOR),
        ("ToolCallDelta", inference_service_pb2.ToolCallDelta.DESCRIPTOR),
        ("Usage", inference_service_pb2.Usage.DESCRIPTOR),
        ("Timings", inference_service_pb2.Timings.DESCRIPTOR),
    ],
)
def test_a_type_has_the_fields_of_its_message(interface: str, message: Descriptor) -> None:
    assert declared(interface) == [field.json_name for field in message.fields]


@pytest.mark.parametrize(
    ("interface", "names"), [("ClientOptions", "CLIENT_OPTIONS"), ("RequestOptions", "OPTIONS")]
)
def test_options_have_the_names_by_which_the_client_takes_them(interface: str, names: str) -> None:
    source = (NODE_CLIENT / "src/client.js").read_text()
    found = re.search(rf"^const {names} = (\[.*\]);$", source, re.MULTILINE)
    assert found is not None
    assert declared(interface) == json.loads(found[1])
