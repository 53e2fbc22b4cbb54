"""What the services of a real deployment log: request ids everywhere, words of users nowhere."""

import json
from pathlib import Path
from typing import Any

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


def test_a_request_can_be_followed_and_its_words_cannot(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, worker_flags=JSON_LOGS, core_flags=JSON_LOGS, frontend_flags=JSON_LOGS
    ) as cluster:
        cluster.start()
        with Client(cluster.frontend_address()) as client:
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            output = client.generate(SECRET, params, request_id="to-be-followed")
            with pytest.raises(errors.InvalidArgument):
                client.generate([10**9], params, request_id="refused")

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
