"""Ranks as children of their launcher."""

import asyncio
import sys

import pytest

from worker_service.launcher import launcher
from worker_service.launcher.launcher import LocalHost


def host_of_two() -> LocalHost:
    return LocalHost(
        arguments=[],
        ranks=range(2),
        group_id="group",
        listen="127.0.0.1:0",
        advertise=None,
        distributed_init="127.0.0.1:1",
    )


async def test_a_rank_that_has_just_ended_does_not_keep_the_others_from_being_signalled() -> None:
    """The launcher may signal all ranks before it has noticed that some have ended."""
    host = host_of_two()
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    host._processes = {0: ended, 1: running}
    host.terminate()
    assert await running.wait() < 0


def test_ranks_share_the_cores_that_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "num_usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert host_of_two()._environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert host_of_two()._environment()["OMP_NUM_THREADS"] == "5"
