"""What a newcomer runs first: the demo, an install, other languages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
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


def test_the_first_examples_run_as_they_are_written(cluster: Cluster, tmp_path: Path) -> None:
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/clients.md"))
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 6
    served_at = {
        "127.0.0.1:7600": cluster.frontend_address(),
        "http://127.0.0.1:8000": cluster.http_url(),
    }
    for number, code in enumerate(blocks):
        script = tmp_path / f"example{number}.py"
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
    ignore = shutil.ignore_patterns(".venv", ".git", "node_modules", "__pycache__", ".*_cache")
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
