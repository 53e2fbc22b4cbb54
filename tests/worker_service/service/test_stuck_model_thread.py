"""The exit code of a worker whose model thread does not end."""

import asyncio
import logging
import os

import pytest

from worker_service import __main__ as main
from worker_service.config import GroupConfig, ModelConfig, WorkerConfig
from worker_service.distributed.layout import Layout
from worker_service.service import lifecycle


class _Ended(BaseException):
    """In place of the process's end."""


@pytest.mark.parametrize(
    ("num_ranks", "has_failed", "code"), [(1, False, 1), (2, False, 0), (2, True, 1)]
)
def test_only_a_rank_that_was_asked_to_end_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_ranks: int,
    has_failed: bool,
    code: int,
) -> None:
    class Stuck:
        is_stuck = True

        def __init__(self, *_: object) -> None:
            self.has_failed = has_failed

        def handle_signals(self) -> None: ...

        async def run(self) -> None: ...

    def end(number: int) -> None:
        raise _Ended(number)

    monkeypatch.setattr(lifecycle, "Worker", Stuck)
    monkeypatch.setattr(main, "_executor_of", lambda *_: None)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    layout = Layout(tensor_parallel_size=num_ranks)
    group = GroupConfig(layout=layout, distributed_init="127.0.0.1:1")
    config = WorkerConfig(model=ModelConfig(model="m"), group=group)
    with pytest.raises(_Ended) as ended:
        asyncio.run(main._run(config))
    assert ended.value.args == (code,)
    assert "the model thread is stuck" in caplog.text
