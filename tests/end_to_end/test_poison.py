"""A request that kills its workers fails; requests that share its batches do not."""

import signal
import threading
from itertools import count
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from tests.end_to_end.test_recovery import facts_of
from tests.support.cluster import Cluster
from tests.support.poisoned_worker import POISON
from tests.support.requests import (
    Answer,
    generate,
    generate_together,
    inference_stub,
    reason,
    request_for,
)
from tools.launch import Service

MAX_DEATHS = 4
"""Two in company, and two in steps that the request has to itself."""


def neighbours(count: int, max_tokens: int) -> list[pb.GenerateRequest]:
    """Requests that share batches with one that kills workers."""
    return [
        request_for(
            [5 + k, 6, 7, 8],
            temperature=0.8,
            seed=k,
            max_tokens=max_tokens,
            ignore_eos=True,
            frequency_penalty=0.1,
            logprobs=1,
        )
        for k in range(count)
    ]


POISONOUS = request_for([POISON] * 8, max_tokens=20)


class Workers:
    """Workers that are started again whenever one has died."""

    def __init__(self, cluster: Cluster, num_workers: int) -> None:
        self.deaths: list[Service] = []
        self._cluster = cluster
        self._numbers = count()
        self._running = [self._start() for _ in range(num_workers)]
        self._may_end = threading.Event()
        self._keeper = threading.Thread(target=self._keep)

    def _start(self) -> Service:
        address = f"unix:{self._cluster.folder}/poisoned-{next(self._numbers)}.sock"
        command = ["tests.support.poisoned_worker", self._cluster.core_address, address]
        return self._cluster.start_program(command)

    def _keep(self) -> None:
        while not self._may_end.wait(0.05):
            for worker in [w for w in self._running if w.process.poll() is not None]:
                self.deaths.append(worker)
                self._running.remove(worker)
                self._running.append(self._start())

    def __enter__(self) -> "Workers":
        self._keeper.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._may_end.set()
        self._keeper.join()


@pytest.mark.parametrize(
    ("num_workers", "others"),
    [
        pytest.param(1, neighbours(5, 300), id="1 worker, 5 others"),
        pytest.param(3, neighbours(200, 60), id="3 workers, 200 others", marks=pytest.mark.long),
    ],
)
def test_one_that_kills_whoever_computes_it_fails_alone_and_its_neighbours_do_not(
    num_workers: int, others: list[pb.GenerateRequest], tmp_path: Path, cluster: Cluster
) -> None:
    with inference_stub(cluster.frontend_address()) as stub:
        undisturbed = [facts_of(answer) for answer in generate_together(stub, others)]
    with Cluster(tmp_path) as cluster:
        cluster.start_core()
        cluster.start_frontend()
        with Workers(cluster, num_workers) as workers:
            cluster.wait_serving()
            cluster.wait_num_ready(num_workers)
            with inference_stub(cluster.frontend_address()) as stub:
                streams = [stub.Generate(request, timeout=300) for request in others]
                answers = [Answer() for _ in streams]
                for stream, answer in zip(streams, answers, strict=True):
                    while not answer.choices:
                        answer.add(next(stream))
                with pytest.raises(grpc.RpcError) as raised:
                    generate(stub, POISONOUS, timeout_s=300)
                assert reason(raised.value) == "WORKERS_LOST"
                assert raised.value.code() is grpc.StatusCode.INTERNAL
                for stream, answer in zip(streams, answers, strict=True):
                    for response in stream:
                        answer.add(response)
                assert [facts_of(answer) for answer in answers] == undisturbed
        died = [worker.process.returncode for worker in workers.deaths]
        assert died == [-signal.SIGKILL] * len(died)
        assert len(died) <= MAX_DEATHS
