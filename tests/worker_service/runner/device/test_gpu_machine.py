"""`make test-gpu` and `make bench-gpu` do without the services' dependencies.

Machines with a GPU often come with torch and Triton installed, and with no way to install more.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
ABSENT = (
    "cryptography",
    "fastapi",
    "google.rpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "grpc_tools",
    "httptools",
    "hypothesis",
    "llguidance",
    "openai",
    "opentelemetry",
    "pydantic",
    "pytest_asyncio",
    "ray",
    "schemathesis",
    "starlette",
    "uvicorn",
)

WITHOUT = "import sys; sys.modules |= dict.fromkeys(sys.argv.pop(1).split(','))\n"
"""Hides packages; as if they were not installed, also to those that only look for them."""

TEST = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
IMPORT = "import importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
START = """
from pathlib import Path
from benchmarks.engines import choice, engine
from benchmarks.models.model_shapes import SHAPES
settings = engine.Settings(shape=SHAPES["llama-160m"], dtype="bfloat16", checkpoints=Path())
try:
    choice.make("pagewire", settings, choice.Programs())
except choice.EngineUnavailable as reason:
    print(reason)
"""


def _recipe(target: str) -> list[list[str]]:
    """What make would run, word by word."""
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = told.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def _modules(target: str) -> list[tuple[str, list[str]]]:
    """The modules that a target runs, and their arguments."""
    found = []
    for words in _recipe(target):
        place = words.index("-m")
        found.append((words[place + 1], words[place + 2 :]))
    return found


def _run_without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    sources = ":".join(str(ROOT / folder) for folder in ("", "kernels", "client", "protos"))
    of_pytest = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, ",".join(ABSENT), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": sources} | of_pytest,
        capture_output=True,
        text=True,
    )


def test_the_tests_for_a_gpu_can_be_collected() -> None:
    [(module, arguments)] = _modules("test-gpu")
    assert module == "pytest"
    run = _run_without(TEST, *arguments, "-p", "pytest_timeout", "--collect-only", "-q")
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert "tests/worker_service/runner/device/test_engine_on_gpu.py::" in run.stdout


def test_there_are_none_elsewhere() -> None:
    [(_, arguments)] = _modules("test-gpu")
    folders = tuple(word for word in arguments if word.startswith("tests/"))
    marked = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    assert marked
    assert [path for path in marked if not path.startswith(folders)] == []


def test_the_benchmarks_can_be_imported_and_say_why_they_leave_the_services_out() -> None:
    modules = {module for module, _ in _modules("bench-gpu")}
    assert modules == {"benchmarks.kernels", "benchmarks.offline"}
    run = _run_without(IMPORT + START, *modules, "benchmarks.engines.in_process")
    needed = "google.rpc, grpc_health, grpc_reflection, llguidance"
    assert run.stdout.strip() == f"its services need {needed}", run.stderr
