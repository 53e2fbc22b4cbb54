"""The benchmark of speculation runs and says what it measured; the times are not judged."""

import json
from pathlib import Path

import pytest

from benchmarks.speculation import WORKLOADS, copied, main


def test_it_writes_a_row_for_each_workload_and_number_of_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dtype", "float32", "--streams", "1", "4", "--turns", "1", "--tokens", "24"]
    main(["embedded", *flags, "--results", str(tmp_path)])
    content = json.loads((tmp_path / "speculation_embedded_float32_ngram.json").read_text())
    rows = content["rows"]
    assert [(row["streams"], row["workload"]) for row in rows] == [
        (streams, workload) for streams in (1, 4) for workload in WORKLOADS
    ]
    for row in rows:
        assert row["ratio"] > 0
        num_requests = max(len(WORKLOADS[row["workload"]].prompts), row["streams"])
        assert 0 < row["tokens"] <= 24 * num_requests
        assert row["tokens_per_step"] >= 0.9
        assert 0 <= row["copied"] <= 1
        assert ("prompt" in row) == (row["streams"] == 1)
    assert sum(row["drafts"] for row in rows) > 0
    assert "tokens/step" in capsys.readouterr().out


def test_tokens_are_copied_that_follow_three_tokens_of_the_prompt_as_they_do_there() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    assert copied(prompt, [1, 2, 3, 4, 5]) == 2
    assert copied(prompt, [2, 3, 4, 9, 3, 4, 5, 6]) == 1
    assert copied([1, 2, 3, 4, 1, 2, 3], [4, 4]) == 1  # the prompt's end counts as context
    assert copied(prompt, []) == 0
