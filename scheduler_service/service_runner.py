"""One gRPC service as a process: its address, health, reflection and orderly end.

Both roles run the same way:

    runner = ServiceRunner(listen="127.0.0.1:7610", service_names=[...], grace_period_s=30, ...)
    add_SomeServiceServicer_to_server(servicer, runner.server)
    await runner.start()             # binds, or raises CannotListen
    await runner.set_serving(True)   # what grpc.health.v1 answers; NOT_SERVING until then
    await runner.wait_for_signal()   # of `end_signals`; a second one ends it at once
    ...                              # let running work finish, within runner.grace_period_s
    await runner.stop()
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from service_common.end_signals import EndSignals, end_signals
from service_common.grpc_server import GrpcServer

logger = logging.getLogger(__name__)


class ServiceRunner(GrpcServer):
    """A server with the signals that end its process."""

    def __init__(self, *, grace_period_s: float, **server: Any) -> None:
        """`server`: what GrpcServer takes."""
        super().__init__(**server)
        self.grace_period_s = grace_period_s
        self._signalled = asyncio.Event()
        self._signals = EndSignals()

    async def wait_for_signal(self, on_signal: Callable[[], None] | None = None) -> None:
        """Wait for a signal to end, call `on_signal`, then answer NOT_SERVING from then on."""
        loop, signals = asyncio.get_running_loop(), end_signals()
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._signalled.wait()
            if on_signal is not None:
                on_signal()
            await self.leave()
        except asyncio.CancelledError:
            for number in signals:
                loop.remove_signal_handler(number)
            raise

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signals.is_second_request(number):
            logger.warning("ending at once signal=%s", name)
            logging.shutdown()
            os._exit(128 + number)
        if not self._signalled.is_set():
            logger.info("shutting down signal=%s grace_period_s=%g", name, self.grace_period_s)
        self._signalled.set()
