"""A hostile core: step streams whose plans are almost valid, fenced or not."""

import random
from collections.abc import Sequence
from typing import Any

from pagewire.v1 import worker_service_pb2 as pb
from tests.fuzz.grpc_calls import GrpcCaller
from tests.fuzz.mutation import mutated_bytes, mutated_message
from tests.support.worker_driver import PlanBuilder, Row

SERVICE = "pagewire.v1.WorkerService"
BLOCK_SIZE = 16


class HostileCore(GrpcCaller):
    """Repeatedly takes over the worker from its core, which takes it back."""

    async def payloads(self, rpc: str) -> Sequence[bytes]:
        """Of a step stream three plans, some of them changed; of others as usual."""
        if rpc != "ExecuteSteps":
            return await super().payloads(rpc)
        rng = self.rng
        return [
            _changed(rng, pb.ExecuteStepsRequest(plans=[plan]))
            for plan in _plans(rng, await self._epoch())
        ]

    async def _epoch(self) -> int:
        """Usually an epoch that the worker accepts, because otherwise it reads no plan."""
        if self.rng.random() < 0.2:
            return self.rng.choice((0, 1, 2**32, 2**64 - 1))
        call = self.channel.unary_unary(
            f"/{SERVICE}/GetInfo",
            request_serializer=pb.GetInfoRequest.SerializeToString,
            response_deserializer=pb.GetInfoResponse.FromString,
        )
        info = await call(pb.GetInfoRequest(), timeout=60)
        return min(info.last_epoch + 1, 2**64 - 1)


def _plans(rng: random.Random, epoch: int) -> Sequence[Any]:
    """A prefill of two sequences, and two decodes of both."""
    plans = PlanBuilder(epoch=epoch, block_size=BLOCK_SIZE)
    lengths = {seq_id: rng.choice((1, 15, 16, 40)) for seq_id in (1, 2)}
    for seq_id, length in lengths.items():
        plans.add(seq_id, [rng.randrange(100) for _ in range(length)])
    prefill = [Row(seq_id, length) for seq_id, length in lengths.items()]
    return [plans.plan(rows) for rows in (prefill, [Row(1), Row(2)], [Row(2), Row(1)])]


def _changed(rng: random.Random, request: pb.ExecuteStepsRequest) -> bytes:
    if rng.random() < 0.5:
        return request.SerializeToString()
    request = mutated_message(rng, request, rng.choice((1, 1, 2, 4)))
    data = request.SerializeToString()
    return mutated_bytes(rng, data) if rng.random() < 0.2 else data
