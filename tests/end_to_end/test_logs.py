"""What the services of a real deployment log: request ids everywhere, words of users nowhere."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire_client import Client, SamplingParams, errors
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until
from tools.launch import Service

JSON_LOGS = ("--log-format", "json", "--log-level", "debug")
SECRET = "Once upon a midnight dreary"


def lines(service: Service) -> list[dict[str, Any]]:
    """All complete lines; each must be an object with what every line has."""
    found = [json.loads(line) for line in service.log.splitlines(keepends=True) if line[-1] == "\n"]
    for line in found:
        assert line.keys() >= {"time", "level", "logger", "event"}
    return found


def send_secrets(url: str) -> None:
    """Send the secret over HTTP, in requests that are answered and in others that are refused."""
    said = [{"role": "user", "content": SECRET}]
    schema = {"type": "object", "properties": {SECRET: {"enum": [SECRET]}}}
    chats: list[tuple[int, dict[str, Any]]] = [
        (200, {"stop": SECRET, "response_format": {"type": "json_object"}}),
        (200, {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}),
        (400, {"temperature": SECRET}),
        (400, {SECRET: 1}),
        (400, {"guided_regex": f"({SECRET}"}),
        (400, {"chat_template": SECRET}),
        (404, {"model": SECRET}),
    ]
    with httpx.Client(base_url=url, timeout=60) as client:
        for status, fields in chats:
            body = {"model": "embedded", "messages": said, "max_tokens": 3} | fields
            assert client.post("/v1/chat/completions", json=body).status_code == status, fields
        assert client.post("/v1/completions", content=f'{{"{SECRET}').status_code == 400
        assert client.get(f"/{SECRET}").status_code == 404


def test_a_request_can_be_followed_and_its_words_cannot(tmp_path: Path) -> None:
    with Cluster(
        tmp_path,
        worker_flags=JSON_LOGS,
        core_flags=JSON_LOGS,
        frontend_flags=(*JSON_LOGS, "--http", "127.0.0.1:0"),
    ) as cluster:
        cluster.start()
        with Client(cluster.frontend_address()) as client:
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            output = client.generate(SECRET, params, request_id="to-be-followed")
            with pytest.raises(errors.InvalidArgument):
                client.generate([10**9], params, request_id="refused")
        (http,) = (line["http"] for line in lines(cluster.frontends[0]) if "http" in line)
        send_secrets(f"http://{http}")

        def ended(request_id: str) -> list[dict[str, Any]]:
            return [
                line
                for line in lines(cluster.frontends[0])
                if line["event"] == "request ended" and line["request_id"] == request_id
            ]

        wait_until(lambda: ended("to-be-followed") and ended("refused"), "both ends are logged")
        assert (
            ended("to-be-followed")[0]
            | {
                "outcome": "ok",
                "num_tokens": 20,
                "level": "debug",
            }
            == (ended("to-be-followed")[0])
        )
        assert ended("refused")[0]["outcome"] == "invalid_argument"
        answer = output.outputs[0].text
        assert len(answer) > 10
        for service in cluster.services:
            text = service.log
            assert len(lines(service)) > 1
            assert SECRET not in text
            assert answer not in text
            assert str(output.outputs[0].token_ids)[1:-1] not in text
