"""Constraints as workers get them, and `ConstraintChecker`, which asks the sandbox."""

import asyncio
import json
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

from pagewire.columns import pack
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument, Unavailable
from scheduler_service.frontend.structured_output.sandbox import find_problem_apart
from service_common import lark


def texts_of(params: sampling_pb2.SamplingParams) -> list[str]:
    """The texts of a constraint: all of a choice's, otherwise one."""
    kind = params.WhichOneof("structured_output")
    assert kind is not None, "the request has a constraint"
    return list(params.choice.choices) if kind == "choice" else [getattr(params, kind)]


def constraint_of(
    params: sampling_pb2.SamplingParams,
    *,
    end_token_ids: Iterable[int],
    last_token_ids: Iterable[int],
) -> sampling_pb2.Constraint:
    """A request's constraint as its worker gets it."""
    kind = params.WhichOneof("structured_output")
    assert kind is not None, "the request has a constraint"
    constraint = sampling_pb2.Constraint(
        end_token_ids=pack(sorted(end_token_ids)),
        last_token_ids=pack(sorted(last_token_ids)),
        thought=params.thought if params.HasField("thought") else None,
    )
    if kind == "choice":
        constraint.choice.CopyFrom(params.choice)
    else:
        setattr(constraint, kind, getattr(params, kind))
    return constraint


def only_tokens(token_ids: Iterable[int], end_token_ids: Iterable[int]) -> sampling_pb2.Constraint:
    """The constraint of an output that consists of some tokens, whatever their text.

    end_token_ids: those of them that end it.
    """
    ranges: list[list[int]] = []
    for token_id in sorted(token_ids):
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    terminal = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
    return sampling_pb2.Constraint(
        grammar=f"start: <[{terminal}]>*", end_token_ids=pack(sorted(end_token_ids))
    )


def to_lark(constraint: sampling_pb2.Constraint) -> None:
    """Convert a grammar in GBNF, which has been checked: workers get Lark only."""
    if constraint.grammar:
        constraint.grammar = lark.from_gbnf(constraint.grammar)


MAX_REMEMBERED = 4096
"""Constraints whose results are cached; an application uses the same few again and again."""

MAX_CHECKS = min(4, max(2, os.cpu_count() or 1))
"""Constraints that are compiled at a time, in a thread each that waits for the sandbox."""

MAX_TENANT_CHECKS = MAX_CHECKS - 1
"""Maximum number of checks of one tenant, so that others' do not have to wait."""

CHECK_TIMEOUT_S = 30.0
"""Timeout of a check, which takes at most a second of processor time; on a machine that is too busy
for that, the request fails and may be retried."""


class ConstraintChecker:
    """Checks that constraints can be enforced.

    A few are checked at a time, fewer of one tenant; the others wait in order. A check whose
    request is cancelled counts until it has finished, so that no tenant can start more checks by
    cancelling them.
    """

    def __init__(self, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(MAX_CHECKS, "constraints")
        self._places = defaultdict[str, asyncio.Semaphore](
            partial(asyncio.Semaphore, MAX_TENANT_CHECKS)
        )
        """By tenant."""
        self._answers: OrderedDict[bytes, str | None] = OrderedDict()
        self._checks: set[asyncio.Task[str | None]] = set()

    async def check(self, params: sampling_pb2.SamplingParams, tenant: str, field: str) -> None:
        """Raise InvalidArgument, naming the field, unless workers can enforce the constraint.

        Raises Unavailable if the check cannot be made now.
        """
        kind = params.WhichOneof("structured_output")
        if kind is None:
            return
        texts = texts_of(params)
        key = blake2b(json.dumps([kind, texts]).encode(), digest_size=16).digest()
        if key in self._answers:
            self._answers.move_to_end(key)
            problem = self._answers[key]
        else:
            problem = await self._check(key, kind, texts, tenant)
        if problem is not None:
            raise InvalidArgument(field, problem)

    def close(self) -> None:
        """Begin no further checks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _check(self, key: bytes, kind: str, texts: list[str], tenant: str) -> str | None:
        """Wait until a check may start, then finish it whether or not the caller still waits."""
        places = self._places[tenant]
        await places.acquire()
        check = asyncio.create_task(self._ask(key, kind, texts))
        self._checks.add(check)

        def end(check: asyncio.Task[str | None]) -> None:
            self._checks.discard(check)
            places.release()
            if not check.cancelled():
                check.exception()  # retrieved, as the caller may have been cancelled

        check.add_done_callback(end)
        return await asyncio.shield(check)

    async def _ask(self, key: bytes, kind: str, texts: list[str]) -> str | None:
        if key in self._answers:  # checked while this one waited
            return self._answers[key]
        loop = asyncio.get_running_loop()
        try:
            problem = await loop.run_in_executor(
                self._threads, find_problem_apart, kind, texts, self._timeout_s
            )
        except (TimeoutError, OSError, EOFError) as error:
            raise Unavailable(
                "the constraint could not be checked now", reason="CONSTRAINT_NOT_CHECKED"
            ) from error
        self._answers[key] = problem
        if len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)
        return problem
