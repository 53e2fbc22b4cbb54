"""The grpcurl commands of the documentation, by what grpcurl does: it asks the server's reflection
for the schema, and sends JSON by it. Nothing of the generated code is used."""

import re
import shlex
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.cluster import Cluster
from tools.launch import ROOT

PAGE = "docs/clients.md"


@dataclass(frozen=True)
class Command:
    """What one grpcurl command asks for."""

    words: tuple[str, ...]
    """What follows the address: `list`, `describe NAME` or `SERVICE/METHOD`."""
    data: str = "{}"


def commands() -> list[Command]:
    """All of them, in their order."""
    found = []
    text = (ROOT / PAGE).read_text().replace("\\\n", " ")
    for line in re.findall(r"^\$ grpcurl (.*)$", text, re.MULTILINE):
        words = shlex.split(line)
        assert words.pop(0) == "-plaintext"
        data = "{}"
        if words[0] == "-d":
            data = words[1]
            del words[:2]
        assert words.pop(0) == "127.0.0.1:7600"
        found.append(Command(tuple(words), data))
    return found


class Reflected:
    """A server, as its reflection describes it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def answer(self, command: Command) -> str:
        """What grpcurl would print, more or less."""
        match command.words:
            case ("list",):
                return "\n".join(self._database.get_services())
            case ("describe", name):
                return "\n".join(self._pool.FindMessageTypeByName(name).fields_by_name)
        service, _, name = command.words[0].partition("/")
        method = self._pool.FindServiceByName(service).methods_by_name[name]
        return self._call(f"/{service}/{name}", method, command.data)

    def _call(self, path: str, method: MethodDescriptor, data: str) -> str:
        make = GetMessageClass(method.input_type)
        read = GetMessageClass(method.output_type)
        kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call = kind(path, make.SerializeToString, read.FromString)
        answered = call(json_format.Parse(data, make()), timeout=60)
        answers = answered if method.server_streaming else [answered]
        return "\n".join(json_format.MessageToJson(answer) for answer in answers)


@pytest.mark.parametrize(
    ("command", "expected"),
    list(
        zip(
            commands(),
            (
                "pagewire.v1.InferenceService",
                "sampling_params",
                " 72",
                '"usage"',
                '"status": "SERVING"',
            ),
            strict=True,
        )
    ),
    ids=lambda value: value.words[-1] if isinstance(value, Command) else "",
)
def test_the_command_answers_by_reflection_alone(
    cluster: Cluster, command: Command, expected: str
) -> None:
    with grpc.insecure_channel(cluster.frontend_address()) as channel:
        answer = Reflected(channel).answer(command)
    text = "".join(re.findall(r'"text": "(.*?)"', answer))  # in as many pieces as there came
    assert expected in answer + text
