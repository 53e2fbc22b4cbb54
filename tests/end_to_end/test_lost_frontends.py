"""A frontend can be killed, or cut off: its clients go on, with the answers they would have had."""

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import AsyncClient, Client, RequestOutput, SamplingParams
from tests.client.test_node_client import NODE_CLIENT
from tests.support.cluster import Cluster
from tests.support.requests import Answer, fold, inference_stub, reason, request_for
from tests.support.worker_flags import FLOAT32

PROMPT = "Once upon a time"
PARAMS = SamplingParams(
    n=2,
    temperature=0.8,
    seed=7,
    max_tokens=350,
    ignore_eos=True,
    frequency_penalty=0.2,
    logprobs=1,
    stop=["never to be seen again"],
)
BEGUN_TOKENS = 30


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, worker_flags=FLOAT32) as victims:
        yield victims


def facts_of(output: RequestOutput) -> list[object]:
    return [
        (c.token_ids, c.text, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason)
        for c in output.outputs
    ]


Began = Callable[[], None]


def with_client(addresses: list[str], began: Began) -> list[object]:
    with Client(",".join(addresses)) as client, client.stream(PROMPT, PARAMS) as stream:
        for _ in stream:
            if len(stream.output.outputs[0].token_ids) > BEGUN_TOKENS:
                began()
        return facts_of(stream.output)


def with_async_client(addresses: list[str], began: Began) -> list[object]:
    async def read() -> list[object]:
        async with AsyncClient(addresses) as client, client.stream(PROMPT, PARAMS) as stream:
            async for _ in stream:
                if len(stream.output.outputs[0].token_ids) > BEGUN_TOKENS:
                    began()
            return facts_of(stream.output)

    return asyncio.run(read())


def with_many(addresses: list[str], began: Began) -> list[object]:
    with Client(addresses) as client:
        outputs = client.generate_many(
            [PROMPT] * 2,
            PARAMS,
            on_progress=lambda p: began() if p.num_generated_tokens > BEGUN_TOKENS else None,
        )
    first, second = map(facts_of, outputs)
    assert first == second
    return first


def with_node(addresses: list[str], began: Began) -> str:
    flags = ["--temperature", "0.8", "--seed", "7", "--max-tokens", "300"]
    command = ["node", "examples/generate.js", "--address", ",".join(addresses), *flags, PROMPT]
    with subprocess.Popen(command, cwd=NODE_CLIENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.read(40)
        began()
        return first + process.stdout.read()


CLIENTS = [with_client, with_async_client, with_many, with_node]


def run_all(addresses: list[str], disturb: Callable[[], None]) -> list[object]:
    """What each client gets; `disturb` is called when all have begun."""
    begun = [threading.Event() for _ in CLIENTS]
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        futures: list[Future[object]] = [
            pool.submit(read, addresses, event.set)  # type: ignore[arg-type]
            for read, event in zip(CLIENTS, begun, strict=True)
        ]
        for event in begun:
            assert event.wait(60)
        disturb()
        return [future.result(timeout=120) for future in futures]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[object]:
    return run_all([cluster.frontend_address()], lambda: None)


def test_clients_of_every_kind_go_on_through_another_frontend(
    victims: Cluster, undisturbed: list[object]
) -> None:
    victims.start(num_frontends=2)
    addresses = [victims.frontend_address(index) for index in range(2)]
    assert run_all(addresses, victims.frontends[0].kill) == undisturbed


def test_clients_of_every_kind_go_on_when_the_only_frontend_is_back(
    victims: Cluster, undisturbed: list[object]
) -> None:
    victims.start()

    def restart() -> None:
        victims.frontends[0].kill()
        victims.restart_frontend(0)

    assert run_all([victims.frontend_address()], restart) == undisturbed


def test_a_client_that_is_cut_off_from_its_frontend_takes_its_request_along(
    victims: Cluster, cluster: Cluster
) -> None:
    request = request_for(PROMPT, request_id="r", max_tokens=300, ignore_eos=True, seed=3)
    with inference_stub(cluster.frontend_address()) as stub:
        whole = fold(stub.Generate(request))
    victims.start(num_frontends=2)
    received = Answer()
    with (
        inference_stub(victims.frontend_address(0)) as stub,
        inference_stub(victims.frontend_address(1)) as other,
    ):
        former = stub.Generate(request)
        for response in former:
            received.add(response)
            if received.choices and len(received.token_ids) > BEGUN_TOKENS:
                break
        # The frontend does not know that nobody reads on, and the core goes on for it.
        with pytest.raises(grpc.RpcError) as refused:
            fold(other.Generate(request))
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        request.attempt = 1
        request.resume.append(
            pb.ResumedChoice(token_ids=received.token_ids, num_chars=len(received.text))
        )
        for response in other.Generate(request):
            received.add(response)
        assert received.token_ids == whole.token_ids
        assert received.text == whole.text
        with pytest.raises(grpc.RpcError) as taken:
            fold(former)
        assert taken.value.code() is grpc.StatusCode.ABORTED
        assert reason(taken.value) == "TAKEN_OVER"
