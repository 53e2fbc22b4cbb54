"""Ranks as children of their launcher."""

import asyncio
import sys

from worker_service.launcher.launcher import LocalHost


async def test_a_rank_that_has_just_ended_does_not_keep_the_others_from_being_signalled() -> None:
    """The launcher may signal all ranks before it has noticed that some have ended."""
    host = LocalHost(
        arguments=[],
        ranks=range(2),
        group_id="group",
        listen="127.0.0.1:0",
        advertise=None,
        distributed_init="127.0.0.1:1",
    )
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    host._processes = {0: ended, 1: running}
    host.terminate()
    assert await running.wait() < 0
