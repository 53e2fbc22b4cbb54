"""Constraints as workers get them, and `ConstraintChecker`, which asks the sandbox."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from pagewire.v1 import sampling_pb2
from scheduler_service.columns import to_column
from scheduler_service.errors import InvalidArgument, Unavailable
from scheduler_service.frontend.structured_output import framing


def texts_of(params: sampling_pb2.SamplingParams) -> list[str]:
    """What the output must match, as texts: all of a choice, else one."""
    kind = params.WhichOneof("structured_output")
    assert kind is not None, "asked for"
    return list(params.choice.choices) if kind == "choice" else [getattr(params, kind)]


def constraint_of(
    params: sampling_pb2.SamplingParams,
    *,
    end_token_ids: Iterable[int],
    last_token_ids: Iterable[int],
) -> sampling_pb2.Constraint:
    """What a worker is told where structured output is asked for."""
    kind = params.WhichOneof("structured_output")
    assert kind is not None, "asked for"
    constraint = sampling_pb2.Constraint(
        end_token_ids=to_column(sorted(end_token_ids)),
        last_token_ids=to_column(sorted(last_token_ids)),
    )
    if kind == "choice":
        constraint.choice.CopyFrom(params.choice)
    else:
        setattr(constraint, kind, getattr(params, kind))
    return constraint


MAX_REMEMBERED = 4096
"""Constraints whose answers are kept; an application has a few, and uses them over and over."""

PATIENCE_S = 30.0
"""For an answer to something that takes a second of a processor at most: on a machine that is busy
beyond measure the request fails, and may be tried again."""

_ROOT = Path(__file__).parents[3]


class ConstraintChecker:
    """What is wrong with constraints. One is tried out at a time, for tenants in turn: however many
    slow ones a tenant brings, another's waits for one of them. The process is started when it is
    first needed."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process: Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self._one_of_each = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """By tenant: held by the one of its constraints whose turn is next."""
        self._answers: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, params: sampling_pb2.SamplingParams, tenant: str) -> None:
        """Raise InvalidArgument, naming the field, unless workers can keep to what `tenant` asks.

        Raises Unavailable if that cannot be found out now.
        """
        kind = params.WhichOneof("structured_output")
        if kind is None:
            return
        message = framing.encode({"kind": kind, "texts": texts_of(params)})
        key = blake2b(message, digest_size=16).digest()
        if key not in self._answers:
            async with self._one_of_each[tenant], self._one_at_a_time:
                if key not in self._answers:
                    self._remember(key, await self._ask(message))
        self._answers.move_to_end(key)
        problem = self._answers[key]
        if problem is not None:
            raise InvalidArgument(f"sampling_params.{kind}", problem)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _remember(self, key: bytes, problem: str | None) -> None:
        self._answers[key] = problem
        if len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)

    async def _ask(self, message: bytes) -> str | None:
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._exchange(message)
        except BaseException as error:
            # An answer may still come: it would be taken for that to the next question.
            await asyncio.shield(self.close())
            if isinstance(error, TimeoutError | OSError | EOFError):
                raise Unavailable(
                    "the constraint could not be checked now", reason="CONSTRAINT_NOT_CHECKED"
                ) from error
            raise

    async def _exchange(self, message: bytes) -> str | None:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await _start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(message)
        await process.stdin.drain()
        header = await process.stdout.readexactly(framing.LENGTH_BYTES)
        answer = await process.stdout.readexactly(framing.length(header))
        problem: str | None = json.loads(answer)["problem"]
        return problem


async def _start() -> Process:
    """The sandbox, with the sources that this process has; a terminal's signals are not for it."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler_service.frontend.structured_output.sandbox",
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
