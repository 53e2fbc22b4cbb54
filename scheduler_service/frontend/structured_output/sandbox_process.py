"""The sandbox as its frontend sees it: a child process that answers several questions at a time."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from scheduler_service.frontend.structured_output import framing

_ROOT = Path(__file__).parents[3]


class SandboxProcess:
    """One process and the questions that it has not answered yet.

    The answer to a question that was cancelled is skipped.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._answers: dict[int, asyncio.Future[str | None]] = {}
        self._last_id = 0
        self._reading = asyncio.create_task(self._read_answers())

    @classmethod
    async def start(cls, num_children: int) -> Self:
        """A process with the sources that this one has; a terminal's signals do not reach it."""
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "scheduler_service.frontend.structured_output.sandbox",
            str(num_children),
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it answers nothing any more."""
        return self._reading.done() or self._process.returncode is not None

    async def find_problem(self, kind: str, texts: Sequence[str]) -> str | None:
        """The problem of a constraint, or None. Raises OSError or EOFError if the process ends
        before it has answered."""
        self._last_id += 1
        question_id = self._last_id
        answer = self._answers[question_id] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            question = {"id": question_id, "kind": kind, "texts": list(texts)}
            self._process.stdin.write(framing.encode(question))
            await self._process.stdin.drain()
            return await answer
        finally:
            del self._answers[question_id]

    async def close(self) -> None:
        """End the process; questions that it has not answered fail."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read_answers(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while True:
                header = await stdout.readexactly(framing.LENGTH_BYTES)
                answer = json.loads(await stdout.readexactly(framing.length(header)))
                waiting = self._answers.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer["problem"])
        except (EOFError, OSError):
            pass
        finally:
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(EOFError("the sandbox has ended"))
