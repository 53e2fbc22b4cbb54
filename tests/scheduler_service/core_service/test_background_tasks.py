"""Tasks that run as long as the core does: their failure is the core's."""

import asyncio
from pathlib import Path

import pytest

from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import serve
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from tests.support.fake_worker import FakeWorker


async def test_a_core_that_cannot_announce_models_any_more_ends_with_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(_: WorkerRegistry) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(WorkerRegistry, "served_models", fail)
    address = f"unix:{tmp_path}/core.sock"
    serving = asyncio.create_task(serve(CoreServiceConfig(listen=address)))
    worker = FakeWorker()
    await worker.start(address)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(serving, 60)
    await worker.kill()
    assert "background task failed" in caplog.text
