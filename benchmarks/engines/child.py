"""The parent's end of an engine that runs in a child process."""

import contextlib
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import psutil

from benchmarks.engines.engine import About, Outputs, Settings
from benchmarks.engines.workloads import Job
from benchmarks.measuring.json_lines import LineProcess
from benchmarks.measuring.processes import send_signal, tree

END_TIMEOUT_S = 10.0
"""An engine that does not end within this time is killed; nothing is lost."""

ROOT = Path(__file__).parents[2]


class ChildEngine:
    """An engine that a module of this package makes under some Python.

    While others run, its processes are stopped: some engines' idle threads spin.
    """

    def __init__(
        self,
        module: ModuleType,
        python: str | Path,
        settings: Settings,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """module: has a NAME, and `described` for what the child receives of the settings."""
        self.name: str = module.NAME
        self._command = [python, "-m", module.__name__, json.dumps(module.described(settings))]
        sources = sys.path if str(python) == sys.executable else [ROOT]
        paths = {"PYTHONPATH": ":".join(str(path) for path in sources if path)}
        self._environment = paths | dict(environment or {})
        self._log = settings.log(module.__name__.rpartition(".")[2])

    @property
    def pids(self) -> list[int]:
        """The process id of the child."""
        return [self._process.pid]

    def run(self, jobs: list[Job]) -> Outputs:
        """Run all jobs together."""
        question: dict[str, Any] = {
            "prompts": [job.prompt for job in jobs],
            "num_tokens": [job.num_output_tokens for job in jobs],
        }
        if any(job.adapter is not None for job in jobs):  # few engines have them
            question["adapters"] = [job.adapter for job in jobs]
        answer = self._process.ask(question)
        return Outputs(**answer)

    def pause(self) -> None:
        """Suspend its processes."""
        send_signal(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume them."""
        send_signal(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self._process = LineProcess(self._command, self._environment, log=self._log)
        self.about = About(**self._process.ready)
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        descendants = tree(self._process.pid)
        self._process.close(END_TIMEOUT_S)
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
