"""The benchmark of scaling out scales the compose file's services, and compares their answers."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.report import render
from benchmarks.scaling_out import Load, Stage, draw_jobs, main
from pagewire_client import AsyncClient, RequestOutput
from pagewire_client.errors import NotFound
from pagewire_client.outputs import CompletionOutput


def test_workers_come_and_go_and_no_request_notices(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    arguments = ["--simulate", "--seconds", "3", "--cycles", "1", "--streams", "6"]
    main([*arguments, "--max-tokens", "100", "--results", str(tmp_path), "--logs", str(logs)])
    content = json.loads((tmp_path / "scaling_out.json").read_text())
    assert content["num_requests"] > 0
    assert (content["num_failed"], content["num_different"]) == (0, 0)
    assert content["num_ended_workers"] == 3
    assert [row["num_workers"] for row in content["rows"]] == [1, 4, 1]
    names = {path.stem.rpartition("-")[0] for path in logs.iterdir()}
    assert names == {"scheduler", "frontend", "worker-cpu"}
    assert "| 4 |" in render("scaling_out", content)


class Astray(AsyncClient):
    """Answers the first request rightly, then wrongly, then not at all."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.num_calls = 0
        self.load: Load | None = None

    async def generate(self, *_: object, **__: object) -> RequestOutput:  # type: ignore[override]
        self.num_calls += 1
        if self.num_calls == 3:
            assert self.load is not None
            self.load.end()
            raise NotFound("gone")
        output = CompletionOutput(index=0, token_ids=[self.num_calls])
        return RequestOutput(request_id="r", outputs=[output])


@pytest.mark.filterwarnings("error")
async def test_other_tokens_and_errors_are_counted() -> None:
    async with Astray() as client:
        load = client.load = Load(client, draw_jobs(1, 8))
        await load.run_undisturbed()
        load.begin_stage(1)
        await load.run(num_streams=1)
    [stage] = load.stages
    assert isinstance(stage, Stage)
    assert (stage.num_requests, stage.num_different) == (1, 1)
    assert stage.errors == Counter({"NotFound: gone": 1})
