"""Traces of the model thread, made with torch's profiler on request."""

import time
from pathlib import Path

import torch

from worker_service.errors import OutOfOrder


class Profiler:
    """At most one trace at a time. Start and stop it on the thread to be traced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin a trace. Raises OutOfOrder if one is running."""
        if self._running is not None:
            raise OutOfOrder("a profile is running already")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def stop(self) -> str:
        """End the trace and write it, for chrome://tracing. Returns the file's path."""
        if self._running is None:
            raise OutOfOrder("no profile is running")
        running, self._running = self._running, None
        running.stop()
        path = self._directory / f"pagewire-worker-{time.strftime('%Y%m%d-%H%M%S')}.json"
        self._directory.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(path))
        return str(path)
