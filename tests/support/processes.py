"""Workers as processes of any kind, for as long as a test needs them."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import ROOT, environment

NODE_WORKER = ROOT / "tests/conformance/node_worker/worker.js"
NODE_MODULES = ROOT / "client/node/node_modules"


def node_worker(*flags: str) -> list[str]:
    """The command that starts the worker in JavaScript."""
    assert NODE_MODULES.is_dir(), "run `npm ci` in client/node first"
    return ["node", str(NODE_WORKER), *flags]


def python_worker(*flags: str) -> list[str]:
    """The command that starts our own worker."""
    return [sys.executable, "-m", "worker_service", *flags]


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process, with its log in the folder; killed at the end if it is still there."""
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(), cwd=folder
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def run_kit(*arguments: str, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
    """`python -m conformance`, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "conformance", *arguments],
        env=environment() | {"COLUMNS": "200", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
