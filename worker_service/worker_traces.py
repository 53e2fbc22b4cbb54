"""The worker's spans: where they are exported to, and what all of them tell."""

import asyncio

from service_common.tracing import Attributes, Tracing, make_tracing
from service_common.version import VERSION
from worker_service.config import WorkerConfig
from worker_service.engine.step_stats import StepMeter
from worker_service.engine.tracing import StreamTraces


class WorkerTraces:
    """Makes the traces of each step stream."""

    def __init__(self, tracing: Tracing, config: WorkerConfig) -> None:
        self._tracing = tracing
        self._group_id = config.network.group_id
        self._rank = config.group.layout.rank

    def of_stream(self, epoch: int, meter: StepMeter) -> StreamTraces:
        """Traces of an epoch's stream, whose steps `meter` counts."""
        attributes: Attributes = {
            "pagewire.group": self._group_id,
            "pagewire.rank": self._rank,
            "pagewire.epoch": epoch,
        }
        return StreamTraces(self._tracing, meter, attributes)

    async def close(self) -> None:
        """Export what is left; waits for it, but not for long."""
        await asyncio.to_thread(self._tracing.close)


def make_traces(config: WorkerConfig) -> WorkerTraces | None:
    """None where neither a flag nor the environment names an endpoint. Raises CannotTrace."""
    network = config.network
    tracing = make_tracing("worker", VERSION, network.otlp_endpoint, network.worker_id)
    return None if tracing is None else WorkerTraces(tracing, config)
