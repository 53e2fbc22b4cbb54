"""What a newcomer runs first: the demo, an install, other languages."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.worker_flags import SMALL_CACHE
from tools.launch import ROOT, environment


def run(
    *command: str | Path, env: dict[str, str] | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


BEFORE_A_FRAGMENT = """
from pagewire_client import Client
client = Client("127.0.0.1:7600")
messages = [{"role": "user", "content": "What is 27 + 45?"}]
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
"""


def test_a_node_program_generates_and_streams(cluster: Cluster) -> None:
    example = ROOT / "client/node/examples/generate.js"
    answer = run("node", example, "--address", cluster.frontend_address(), "27 + 45 =")
    assert answer.returncode == 0, answer.stderr
    assert "72" in answer.stdout


def write_embedder(folder: Path) -> None:
    """The embedded model with a prompt for queries."""
    shutil.copytree(ROOT / "worker_service/embedded_model", folder)
    (folder / "1_Pooling").mkdir()
    library = "sentence_transformers.models"
    for name, content in {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{library}.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{library}.Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
        "config_sentence_transformers.json": {"prompts": {"query": "find: "}},
    }.items():
        (folder / name).write_text(json.dumps(content))


def test_the_first_examples_run_as_they_are_written(tmp_path: Path) -> None:
    write_embedder(tmp_path / "embedder")
    with Cluster(
        tmp_path, worker_flags=SMALL_CACHE, frontend_flags=["--http", "127.0.0.1:0"]
    ) as cluster:
        cluster.start()
        cluster.start_worker("--model", str(tmp_path / "embedder"), "--runner", "pooling")
        cluster.wait_num_ready(2)
        run_examples(cluster, tmp_path)


def run_examples(cluster: Cluster, folder: Path) -> None:
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/clients.md"))
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 7
    served_at = {
        "127.0.0.1:7600": cluster.frontend_address(),
        "http://127.0.0.1:8000": cluster.http_url(),
    }
    for number, code in enumerate(blocks):
        script = folder / f"example{number}.py"
        is_full = "import " in code
        code = code if is_full else BEFORE_A_FRAGMENT + code
        for address, here in served_at.items():
            code = code.replace(address, here)
        script.write_text(code)
        example = run(sys.executable, script)
        assert example.returncode == 0, example.stderr
        assert example.stdout.strip() or not is_full


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with `pip install .` and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    source = folder / "source"
    ignored = (".venv", ".git", "build", "node_modules", "__pycache__", ".*_cache", ".hypothesis")
    ignore = shutil.ignore_patterns(*ignored)
    shutil.copytree(ROOT, source, ignore=ignore)
    venv = folder / "venv"
    assert run(sys.executable, "-m", "venv", venv).returncode == 0
    pip = run(venv / "bin/python", "-m", "pip", "install", "--quiet", source, env=dict(os.environ))
    assert pip.returncode == 0, pip.stderr
    return venv / "bin"


def test_an_install_without_torch_is_a_working_client(
    cluster: Cluster, bare_environment: Path
) -> None:
    env = {"PATH": str(bare_environment)}
    assert run(bare_environment / "python", "-c", "import torch", env=env).returncode != 0
    answer = run(
        bare_environment / "pagewire",
        "generate",
        "--address",
        cluster.frontend_address(),
        "--temperature",
        "0",
        "27 + 45 =",
        env=env,
    )
    assert answer.returncode == 0, answer.stderr
    assert "72" in answer.stdout
    missing = run(bare_environment / "pagewire", "worker", env=env)
    assert missing.returncode != 0
    assert ".[worker]" in missing.stderr


def test_the_command_line_explains_itself(bare_environment: Path) -> None:
    text = run(bare_environment / "pagewire", "--help", env={"PATH": "", "COLUMNS": "100"}).stdout
    for command in ("serve", "generate", "chat", "worker", "scheduler", "frontend", "demo"):
        assert command in text
