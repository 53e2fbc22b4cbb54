"""A child process with requests and answers as lines of JSON.

An engine thus runs under a Python of its own, with its own threads and memory.
The child's side of it is `engines/lines.py`, or anything else that keeps to this: one line when it
is ready, then one for each line that it reads, until there are no more.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class LineProcess:
    """A context manager around such a process; starting it waits until it is ready."""

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
    ) -> None:
        """`environment` is added to our own. `log`: where what it says besides answers goes."""
        with open(log or os.devnull, "w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | (environment or {}),
                text=True,
            )
        self._log = log
        try:
            self.ready: dict[str, Any] = self._answer()
            """Its first line, which it writes when it is ready."""
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, request: object) -> Any:
        """Its answer. Raises RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}{self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        return ":\n" + "\n".join(self._log.read_text().splitlines()[-20:])

    def close(self, timeout_s: float = 30.0) -> None:
        """End it: it sees the end of its input, and is killed if that does not help."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
