"""Whatever a client sends, the frontend goes on."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any

import pytest

from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument, Unavailable
from scheduler_service.frontend.structured_output.constraint import (
    MAX_CHECKS,
    MAX_TENANT_CHECKS,
    ConstraintChecker,
)

HOSTILE = {
    "slow": {"regex": "a?" * 20_000},
    "large": {
        "json_schema": json.dumps(
            {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(60)]}
        )
    },
    "deep": {
        "grammar": "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000))
        + '\nr20000: "a"'
    },
}


@pytest.fixture
async def checker() -> AsyncIterator[ConstraintChecker]:
    checker = ConstraintChecker(timeout_s=600.0)  # a second of a processor, shared by many
    yield checker
    checker.close()


def pid_of_server() -> int:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


async def problem_of(checker: ConstraintChecker, **fields: Any) -> str | None:
    try:
        await checker.check(sampling_pb2.SamplingParams(**fields), "anybody", "field")
    except InvalidArgument as error:
        return str(error).removeprefix("field: ")
    return None


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_takes_too_much_is_refused_and_others_are_served(
    checker: ConstraintChecker, name: str
) -> None:
    problem = await problem_of(checker, **HOSTILE[name])
    assert problem is not None
    assert problem.startswith("too complex")
    assert await problem_of(checker, regex="a+") is None
    assert await problem_of(checker, regex="a(") == "unclosed group at offset 1"


async def test_requests_without_structured_output_start_nothing(checker: ConstraintChecker) -> None:
    await checker.check(sampling_pb2.SamplingParams(n=2), "anybody", "field")
    assert not checker._threads._threads


async def test_an_answer_is_remembered(checker: ConstraintChecker) -> None:
    assert await problem_of(checker, regex="a(") is not None
    checker.close()
    assert await problem_of(checker, regex="a(") == "unclosed group at offset 1"


async def test_a_lost_process_is_replaced(checker: ConstraintChecker) -> None:
    error: Unavailable | None = None
    regex = ""
    while error is None:  # on a busy machine, one that asks may find the process gone
        regex += "a"
        assert await problem_of(checker, regex=regex) is None
        first = pid_of_server()
        os.kill(first, signal.SIGSTOP)
        asking = asyncio.create_task(problem_of(checker, regex=f"{regex}b"))
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        try:
            await asking
        except Unavailable as unavailable:
            error = unavailable
    assert "could not be checked" in str(error)
    # Its pipes close a little earlier.
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert await problem_of(checker, regex="b") is None
    assert pid_of_server() != first


async def test_a_client_that_goes_away_spoils_nobodys_answer(checker: ConstraintChecker) -> None:
    await problem_of(checker, regex="a")
    first = pid_of_server()
    for count in range(1, 20):
        asking = asyncio.create_task(problem_of(checker, regex="c(" * count))
        while not checker._checks:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        problem = await problem_of(checker, regex="d" * count + "[")
        assert problem == f"unclosed character class at offset {count}"
    assert pid_of_server() == first


async def test_cancelled_checks_leave_the_places_of_others_free(checker: ConstraintChecker) -> None:
    """They keep their own until they are answered; those that wait for one leave at once."""
    slow = [HOSTILE["slow"]["regex"] + "x" * count for count in range(4)]
    asking = [asyncio.create_task(problem_of(checker, regex=pattern)) for pattern in slow]
    while len(checker._checks) < MAX_TENANT_CHECKS:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert len(checker._checks) == MAX_TENANT_CHECKS
    await checker.check(sampling_pb2.SamplingParams(regex="b"), "another", "field")
    assert len(checker._checks) == MAX_TENANT_CHECKS


async def test_questions_at_once_get_each_their_own_answer(checker: ConstraintChecker) -> None:
    patterns = [f"{'x' * n}{end}" for n in range(8) for end in ("", "(")]
    problems = await asyncio.gather(*(problem_of(checker, regex=p) for p in patterns if p))
    expected = [
        None if p[-1] == "x" else f"unclosed group at offset {len(p) - 1}" for p in patterns if p
    ]
    assert problems == expected


async def test_one_tenants_constraints_do_not_hold_up_anothers(checker: ConstraintChecker) -> None:
    done: list[str] = []

    async def ask(tenant: str, pattern: str) -> None:
        with suppress(InvalidArgument):
            await checker.check(sampling_pb2.SamplingParams(regex=pattern), tenant, "field")
        done.append(tenant)

    slow = [HOSTILE["slow"]["regex"] + "x" * count for count in range(4)]
    await asyncio.gather(*(ask("flood", pattern) for pattern in slow), ask("calm", "b"))
    assert len(done) == 5
    assert done.index("calm") < MAX_CHECKS
