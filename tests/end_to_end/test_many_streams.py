"""A thousand streams at once through frontends, over gRPC and over HTTP."""

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import grpc
import pytest

from pagewire.v1 import inference_service_pb2_grpc as services
from tests.support.cluster import Cluster
from tests.support.requests import request_for

NUM_STREAMS = 1000
NUM_TOKENS = 40
NUM_FRONTENDS = 2


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Steps long enough for all streams to be open at once, batches large enough for them all."""
    with Cluster(
        tmp_path_factory.mktemp("many"),
        frontend_flags=["--http", "127.0.0.1:0"],
        core_flags=["--max-num-seqs", str(NUM_STREAMS), "--max-num-batched-tokens", "16384"],
        worker_flags=["--simulate", "--simulate-step-us", "50000"],
    ) as cluster:
        yield cluster.start(num_frontends=NUM_FRONTENDS)


def prompt(index: int) -> list[int]:
    return [3 + index % 1000, 4 + index // 1000, 5, 6]


class Together:
    """Holds every stream's reader at its first token until all have one."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._all = asyncio.Event()

    async def begun(self) -> None:
        self.num_begun += 1
        if self.num_begun == NUM_STREAMS:
            self._all.set()
        await self._all.wait()


async def over_grpc(cluster: Cluster, together: Together) -> list[int]:
    """Tokens that each stream brought; raises if one ends badly."""

    async def read(stub: services.InferenceServiceStub, index: int) -> int:
        request = request_for(prompt(index), max_tokens=NUM_TOKENS, ignore_eos=True, seed=index)
        count = 0
        async for response in stub.Generate(request):
            new = sum(len(choice.token_ids) for choice in response.choices)
            if new and not count:
                await together.begun()
            count += new
        return count

    addresses = [cluster.frontend_address(index) for index in range(NUM_FRONTENDS)]
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        stubs = [services.InferenceServiceStub(channel) for channel in channels]
        reads = (read(stubs[index % NUM_FRONTENDS], index) for index in range(NUM_STREAMS))
        return await asyncio.gather(*reads)
    finally:
        for channel in channels:
            await channel.close()


async def over_http(cluster: Cluster, together: Together) -> list[int]:
    """The same on a connection each; the usage is the last thing that a complete stream reports."""

    async def read(session: aiohttp.ClientSession, index: int) -> int:
        wish = {
            "prompt": prompt(index),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "seed": index,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 0,
        }
        url = f"{cluster.http_url(index % NUM_FRONTENDS)}/v1/completions"
        events = []
        async with session.post(url, json=wish) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.strip():
                    events.append(line.removeprefix(b"data: ").strip())
                    if len(events) == 1:
                        await together.begun()
        assert events[-1] == b"[DONE]"
        usage = json.loads(events[-2])["usage"]
        told = [json.loads(event)["choices"] for event in events[:-2]]
        assert sum(len(c["logprobs"]["tokens"]) for choices in told for c in choices) == NUM_TOKENS
        return int(usage["completion_tokens"])

    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(read(session, index) for index in range(NUM_STREAMS)))


@pytest.mark.parametrize("way", [pytest.param(over_grpc, marks=pytest.mark.long), over_http])
def test_a_thousand_streams_end_whole(simulated: Cluster, way) -> None:  # type: ignore[no-untyped-def]
    together = Together()
    assert asyncio.run(way(simulated, together)) == [NUM_TOKENS] * NUM_STREAMS
    assert together.num_begun == NUM_STREAMS
