"""Mutated calls of every method of a service."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from tests.fuzz.mutation import mutated_bytes, mutated_message
from tests.fuzz.outcome import Outcome

CALL_TIMEOUT_S = 180.0
"""Longer than a call may wait on a busy machine."""
STREAM_TIMEOUT_S = 0.2
"""Time limit for streams without an end."""

WROTE_TO_ENDED = "Internal error from Core"
"""The library's error for a write to a call that the server has just ended, without its status."""

UNREADABLE = "DecodeError"
"""Part of the library's own error for malformed bytes."""

BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


def _generate(**fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id="r", **fields)
    params = request.sampling_params
    params.max_tokens, params.temperature, params.seed = 8, 0.7, 3
    params.logit_bias.add(token_id=5, bias=1.0)
    return request


SEEDS: Mapping[str, Sequence[Message]] = {
    "Generate": [
        _generate(token_ids=pb.PromptTokens(ids=[5, 6, 7])),
        _generate(text="Hello"),
        _generate(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])),
    ],
    "GenerateMany": [
        pb.GenerateManyRequest(request=_generate(token_ids=pb.PromptTokens(ids=[5, 6, 7])))
    ],
    "Abort": [pb.AbortRequest(request_id="r")],
    "Tokenize": [pb.TokenizeRequest(text="Hello"), pb.TokenizeRequest(model="simulated")],
    "Detokenize": [pb.DetokenizeRequest(token_ids=[5, 6, 7])],
    "GetModel": [pb.GetModelRequest(model="simulated")],
    "GetStatus": [pb.GetStatusRequest()],
    "WatchStatus": [pb.WatchStatusRequest(interval_ms=100)],
}
"""Methods of the public service; each takes any number of messages here."""

CORE_SEEDS: Mapping[str, Sequence[Message]] = {
    "Attach": [
        scheduler_pb.AttachRequest(
            message=scheduler_pb.FrontendMessage(
                frontend_id="hostile",
                submits=[
                    scheduler_pb.Submit(
                        handle=1,
                        request_id="r",
                        model="simulated",
                        prompt_token_ids=b"\x05\0\0\0\x06\0\0\0",
                        generation=scheduler_pb.Generation(
                            num_choices=1,
                            max_tokens=4,
                        ),
                    )
                ],
            )
        )
    ],
    "RegisterWorker": [
        scheduler_pb.RegisterWorkerRequest(
            heartbeat=scheduler_pb.WorkerHeartbeat(
                registration=scheduler_pb.WorkerRegistration(
                    worker_id="hostile", group_id="hostile", world_size=1, address="unix:/nowhere"
                )
            )
        )
    ],
    "GetModelAssets": [scheduler_pb.SchedulerServiceGetModelAssetsRequest(model="simulated")],
    "Abort": [scheduler_pb.SchedulerServiceAbortRequest(request_id="r")],
    "GetStatus": [scheduler_pb.SchedulerServiceGetStatusRequest()],
    "WatchStatus": [scheduler_pb.SchedulerServiceWatchStatusRequest(interval_ms=100)],
    "DrainWorker": [scheduler_pb.DrainWorkerRequest(group_id="nobody")],
}
"""Methods of the core: hostile frontends and workers."""

WORKER_SEEDS: Mapping[str, Sequence[Message]] = {
    "GetInfo": [worker_pb.GetInfoRequest()],
    "GetModelAssets": [worker_pb.WorkerServiceGetModelAssetsRequest()],
    "ProfileBlocks": [worker_pb.ProfileBlocksRequest(max_num_seqs=4, max_num_batched_tokens=64)],
    "ExecuteSteps": [],
}
"""Of a worker: a hostile core, which makes its step streams itself. Without InitializeCache, whose
caches may be as large as whoever calls it says."""

ENDLESS = ("WatchStatus", "Attach", "RegisterWorker", "ExecuteSteps")


class GrpcCaller:
    """Makes mutated calls at one address."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        service: str,
        seeds: Mapping[str, Sequence[Message]],
        rng: random.Random,
        outcome: Outcome,
    ) -> None:
        self.channel = channel
        self._service = service
        self._seeds = seeds
        self.rng = rng
        self._outcome = outcome

    async def call(self) -> None:
        """Make one call, to its end."""
        rng = self.rng
        rpc = rng.choice([*self._seeds, *self._usual()])
        payloads = await self.payloads(rpc)
        timeout_s = STREAM_TIMEOUT_S if rpc in ENDLESS else CALL_TIMEOUT_S
        call = self.channel.stream_stream(f"/{self._service}/{rpc}")(
            timeout=timeout_s, metadata=self._metadata()
        )
        code = await self._finish(call, payloads, is_cut=rng.random() < 0.1)
        details = await call.details()
        if details == WROTE_TO_ENDED:
            self._outcome.note("ended while being written to")
            return
        self._outcome.note(code.name)
        is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED and rpc not in ENDLESS
        if UNREADABLE in (details or ""):
            return
        if code in BUGS or is_late:
            self._outcome.blame(f"{rpc}: {code.name} {details!r}: {payloads!r}")

    async def payloads(self, rpc: str) -> Sequence[bytes]:
        """The messages of one call."""
        return [self._payload(rpc) for _ in range(self._num_messages(rpc))]

    def _usual(self) -> list[str]:
        return ["Generate"] * 8 + ["GenerateMany"] * 4 if "Generate" in self._seeds else []

    def _num_messages(self, rpc: str) -> int:
        if rpc in ("GenerateMany", "Attach", "RegisterWorker", "ExecuteSteps"):
            return self.rng.choice((1, 2, 5))
        # Services for members wait for a call's request as long as the call lives.
        none = 1 if self._seeds is SEEDS else 0
        return self.rng.choices((0, 1, 2), (none, 50, 1))[0]

    def _payload(self, rpc: str) -> bytes:
        rng = self.rng
        message = mutated_message(rng, rng.choice(self._seeds[rpc]), rng.choice((0, 1, 1, 2, 4)))
        if "Generate" in rpc and rng.random() < 0.7:
            request: Any = getattr(message, "request", message)
            request.request_id = f"r{rng.randrange(10**9)}"
        data = message.SerializeToString()
        return mutated_bytes(rng, data) if rng.random() < 0.25 else data

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        if self.rng.random() < 0.9:
            return ()
        return (("authorization", "Bearer \x7e"), ("x-noise-bin", self.rng.randbytes(20)))

    async def _finish(
        self, call: Any, payloads: Sequence[bytes], *, is_cut: bool
    ) -> grpc.StatusCode:
        try:
            for payload in payloads:
                await call.write(payload)
            if is_cut:
                call.cancel()
            else:
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        except (
            Exception
        ):  # the library has several for a call that has ended; the code gives the reason
            pass
        code: grpc.StatusCode = await call.code()
        return code


async def call_many(
    address: str,
    service: str,
    seeds: Mapping[str, Sequence[Message]],
    *,
    num_calls: int,
    seed: int,
    outcome: Outcome,
    caller: type[GrpcCaller] = GrpcCaller,
    num_at_once: int = 16,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Make `num_calls` calls, some at a time on each of a few connections."""

    async def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        share = num_calls // num_at_once
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            calls = caller(channel, service, seeds, rng, outcome)
            for _ in range(share):
                await calls.call()
                on_progress()

    await asyncio.gather(*(work(number) for number in range(num_at_once)))
