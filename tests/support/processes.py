"""Workers as processes of any kind, for as long as a test needs them."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.launch import ROOT, Service, environment, module

NODE_WORKER = ROOT / "tests/conformance/node_worker/worker.js"
NODE_MODULES = ROOT / "client/node/node_modules"


def node_worker(*flags: str) -> list[str]:
    """The command that starts the worker in JavaScript."""
    assert NODE_MODULES.is_dir(), "run `npm ci` in client/node first"
    return ["node", str(NODE_WORKER), *flags]


def python_worker(*flags: str) -> list[str]:
    """The command that starts our own worker."""
    return module("worker_service", *flags)


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process, with its log in the folder; killed at the end if it is still there."""
    service = Service("worker", command, folder / "worker.log")
    try:
        yield service.process
    finally:
        service.kill()


def run_kit(*arguments: str, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
    """`python -m conformance`, run to its end."""
    return subprocess.run(
        module("conformance", *arguments),
        env=environment() | {"COLUMNS": "200", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
