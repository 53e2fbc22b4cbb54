"""Workers whose instruction sets differ: requests keep to equal ones, or it is counted."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.status_pb2 import WorkerGroupStatus
from pagewire_client import Client, RequestOutput, SamplingParams
from tests.support.cluster import READY, Cluster
from tests.support.scrapes import scrape
from tests.support.waiting import wait_until
from tests.support.worker_flags import FLOAT32, SMALL_CACHE
from tools import launch

LESSER = "avx2" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "default"
"""Instruction set of the worker that differs."""

NUM_STREAMS = 6
NUM_TOKENS = 400


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, worker_flags=FLOAT32, core_flags=("--metrics-port", "0")) as cluster:
        cluster.start(num_workers=2)
        address = f"unix:{tmp_path}/lesser.sock"
        command = launch.worker(
            address, cluster.core_address, "--model", "embedded", *FLOAT32, *SMALL_CACHE
        )
        cluster.start_foreign_worker(["env", f"ATEN_CPU_CAPABILITY={LESSER}", *command])
        cluster.wait_num_ready(3)
        yield cluster


class Streams:
    """Requests in the background, of which the core has generated some tokens."""

    def __init__(self, cluster: Cluster) -> None:
        self.outputs: list[RequestOutput] = []
        before = num_generated(cluster)
        self._threads = [
            threading.Thread(target=self._generate, args=(cluster.frontend_address(), seed))
            for seed in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()
        wait_until(
            lambda: num_generated(cluster) > before + 20 * NUM_STREAMS, "requests have output"
        )

    def _generate(self, address: str, seed: int) -> None:
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        with Client(address) as client:
            self.outputs.append(client.generate([1, 2, 3 + seed], params))

    def num_inexact_recoveries(self) -> int:
        """Of all, once they have ended."""
        for thread in self._threads:
            thread.join(timeout=120)
        assert len(self.outputs) == NUM_STREAMS
        timings = [output.timings for output in self.outputs]
        return sum(timing.num_inexact_recoveries for timing in timings if timing is not None)


def groups(cluster: Cluster) -> list[WorkerGroupStatus]:
    with grpc.insecure_channel(cluster.core_address) as channel:
        request = scheduler_pb.SchedulerServiceGetStatusRequest()
        status = SchedulerServiceStub(channel).GetStatus(request, timeout=60).status
    return [group for group in status.groups if group.state == READY]


def num_generated(cluster: Cluster) -> float:
    return scrape(cluster.core).sum("pagewire_delivered_tokens_total")


def test_requests_keep_to_workers_of_equal_arithmetic_while_there_are_any(
    cluster: Cluster,
) -> None:
    arithmetic = [group.arithmetic for group in groups(cluster)]
    assert len(set(arithmetic)) == 2
    assert any(LESSER in identity for identity in arithmetic)

    streams = Streams(cluster)
    cluster.workers[0].kill()
    assert streams.num_inexact_recoveries() == 0
    assert scrape(cluster.core).sum("pagewire_requests_recovered_total") > 0
    assert scrape(cluster.core).sum("pagewire_inexact_recoveries_total") == 0

    streams = Streams(cluster)
    busiest = max(groups(cluster), key=lambda group: group.num_running_sequences)
    cluster.workers[2 if LESSER in busiest.arithmetic else 1].kill()
    num_inexact = streams.num_inexact_recoveries()
    assert num_inexact > 0
    assert scrape(cluster.core).sum("pagewire_inexact_recoveries_total") == num_inexact
