"""`pagewire bench` against real services: what it counts, refuses, and shows when broken off."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagewire_cli.app import app
from pagewire_client import Client
from tests.support.cluster import Cluster
from tools.launch import environment


@pytest.fixture
def bench(cluster: Cluster) -> Any:
    """Runs the command in this process against the real services."""

    def call(*arguments: str) -> Any:
        address = ("--address", cluster.frontend_address())
        return CliRunner().invoke(app, ["bench", *address, *arguments], catch_exceptions=False)

    return call


def test_every_rate_is_a_column_and_every_token_counted(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    lengths = ["--input-tokens", "4-20", "--output-tokens", "3-6", "--prefix-tokens", "16"]
    done = bench("--rate", "200", "--rate", "inf", "--num-requests", "12", *lengths, "--json", file)
    assert done.exit_code == 0, done.output
    assert re.search(r"complete\s+│ 12\s+│ 12\s", done.stdout)
    assert "all at once" in done.stdout
    figures = json.loads(file.read_text())
    assert [line["rate"] for line in figures["rates"]] == ["200.0", "inf"]
    for line in figures["rates"]:
        assert (line["num_complete"], line["num_failed"]) == (12, 0)
        assert 12 * 3 <= line["output_tokens_per_s"] * line["duration_s"] <= 12 * 6 + 1
        times = line["first_token_ms"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= line["total_ms"]["p99"]
        assert line["inter_token_ms"]["p50"] >= 0


def test_a_run_has_prompts_of_its_own_unless_it_is_given_the_seed_of_another(
    bench: Any, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--num-requests", "4", "--input-tokens", "200", "--output-tokens", "2"]
    first = bench(*arguments, "--json", file)
    figures = json.loads(file.read_text())
    assert figures["rates"][0]["cached_prompt_percent"] < 10
    assert "warning" not in first.stderr
    assert f"--seed {figures['seed']} " in first.stdout
    assert re.search(r"prompt tokens from cache, %\s+│ 0\.0 ", first.stdout)
    other = bench(*arguments, "--json", file)
    assert json.loads(file.read_text())["seed"] != figures["seed"]
    assert "warning" not in other.stderr
    again = bench(*arguments, "--seed", str(figures["seed"]), "--json", file)
    [line] = json.loads(file.read_text())["rates"]
    assert line["cached_prompt_percent"] > 50
    assert f"warning: {line['cached_prompt_percent']:g} % of the prompt tokens came" in again.stderr
    shared = bench(*arguments, "--seed", str(figures["seed"]), "--prefix-tokens", "200")
    assert "warning" not in shared.stderr


def test_what_the_model_cannot_hold_is_refused_before_anything_is_sent(cluster: Cluster) -> None:
    done = subprocess.run(
        command(cluster, "--input-tokens", "1000000"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: --prefix-tokens, --input-tokens, --output-tokens: ")
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_shows_what_was_measured_so_far(cluster: Cluster) -> None:
    """At one request a second, sixty of them take a minute."""
    lengths = ("--input-tokens", "4", "--output-tokens", "2", "--rate", "1", "--warmup", "0")
    with Client(cluster.frontend_address()) as client:
        before = client.get_status().num_finished
        with subprocess.Popen(
            command(cluster, "--num-requests", "60", *lengths),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as bench:
            statuses = client.watch_status(0.1)
            while next(statuses).num_finished <= before + 1:
                assert bench.poll() is None
            bench.send_signal(signal.SIGINT)
            shown, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert errors == ""
    complete = re.search(r"complete\s+│ (\d+)\s", shown)
    assert complete
    assert 1 <= int(complete[1]) < 60


def command(cluster: Cluster, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "pagewire_cli", "bench"]
    return [*program, "--address", cluster.frontend_address(), *arguments]
