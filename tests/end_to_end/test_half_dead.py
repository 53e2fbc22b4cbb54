"""Processes that are stopped, hang, or come back late: streams go on, and nobody is in the way.

The workers are simulated: real processes with real streams, whose tokens depend on all before them.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2, status_pb2
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.cluster import Cluster
from tests.support.requests import Answer, generate_together, inference_stub, request_for
from tests.support.waiting import wait_until
from tools import launch
from tools.launch import Service

READY, HUNG = status_pb2.WORKER_STATE_READY, status_pb2.WORKER_STATE_HUNG
NUM_STREAMS = 4
LEASE = ("--lease-ms", "500")


def requests() -> list[pb.GenerateRequest]:
    """Long enough to be there when something happens: a step takes 2 ms."""
    return [
        request_for([7, seed], temperature=1.0, seed=seed, max_tokens=500, ignore_eos=True, n=2)
        for seed in range(NUM_STREAMS)
    ]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.choices[index].token_ids for answer in answers for index in (0, 1)]


@contextmanager
def streaming(stub: InferenceServiceStub) -> Iterator[Callable[[], list[list[int]]]]:
    """Streams that have all begun; what is yielded waits for their tokens."""
    begun = Semaphore(0)

    def read(request: pb.GenerateRequest) -> Answer:
        answer = Answer()
        for response in stub.Generate(request, timeout=120):
            answer.add(response)
            if response.choices:
                begun.release()
        return answer

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures: list[Future[Answer]] = [pool.submit(read, asked) for asked in requests()]
        for _ in range(10 * NUM_STREAMS):
            assert begun.acquire(timeout=60)
        yield lambda: tokens_of([future.result(timeout=120) for future in futures])


def groups(cluster: Cluster) -> dict[str, status_pb2.WorkerGroupStatus]:
    with grpc.insecure_channel(cluster.core_address) as channel:
        request = scheduler_service_pb2.SchedulerServiceGetStatusRequest()
        status = SchedulerServiceStub(channel).GetStatus(request, timeout=60).status
    return {group.group_id: group for group in status.groups}


def states(cluster: Cluster) -> dict[str, int]:
    return {group_id: group.state for group_id, group in groups(cluster).items()}


@contextmanager
def stopped(service: Service) -> Iterator[None]:
    """A process that is stopped, and goes on afterwards."""
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


class SimulatedCluster(Cluster):
    """A cluster of simulated workers, each a group with a given id."""

    def start_worker(self, *flags: str) -> Service:
        index = len(self.workers)
        address = f"unix:{self.folder}/worker-{index}.sock"
        flags = ("--simulate", "--group-id", f"group-{index}", *flags)
        command = launch.worker(address, self.core_address, *flags)
        self.workers.append(self._start(f"worker-{index}", command))
        return self.workers[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with SimulatedCluster(tmp_path_factory.mktemp("undisturbed")) as cluster:
        cluster.start()
        with inference_stub(cluster.frontend_address()) as stub:
            return tokens_of(generate_together(stub, requests()))


def start(cluster: Cluster, *, num_workers: int, step_us: int = 2000) -> None:
    cluster.start_core()
    cluster.start_frontend()
    for _ in range(num_workers):
        cluster.start_worker("--simulate-step-us", str(step_us))
    cluster.wait_serving()
    wait_until(lambda: [*states(cluster).values()] == [READY] * num_workers, "all groups are ready")


def test_a_worker_whose_step_hangs_is_told_to_end_and_does(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    flags = ("--step-timeout", "0.3", "--first-step-timeout", "0.3")
    with SimulatedCluster(tmp_path, core_flags=flags) as cluster:
        start(cluster, num_workers=1, step_us=3_600_000_000)
        with (
            inference_stub(cluster.frontend_address()) as stub,
            ThreadPoolExecutor(1) as pool,
        ):
            answers = pool.submit(generate_together, stub, requests())
            # Its heartbeats go on; all that hangs is the thread of the model.
            assert cluster.workers[0].wait() == 1
            cluster.start_worker("--simulate-step-us", "2000")
            assert tokens_of(answers.result(timeout=120)) == undisturbed
        assert "is overdue" in (cluster.core.log if cluster.core else "")
        assert "the model thread is stuck" in cluster.workers[0].log


@pytest.mark.long
def test_of_two_cores_at_one_address_the_older_gives_up(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    """The older is stopped for so long that its peers look for it elsewhere, and comes back."""
    with SimulatedCluster(tmp_path, core_flags=LEASE) as cluster:
        start(cluster, num_workers=1)
        older = cluster.core
        assert older is not None
        with inference_stub(cluster.frontend_address()) as stub, streaming(stub) as tokens:
            with stopped(older):
                os.unlink(tmp_path / "core.sock")
                older.log_path.rename(tmp_path / "older.log")
                cluster.start_core()
                assert tokens() == undisturbed
                (group,) = groups(cluster).values()
                assert group.epoch == 2
            # What it does next it does within its lease, and then it has no worker any more.
            log = tmp_path / "older.log"
            wait_until(lambda: "worker lost" in log.read_text(), "the older has no worker any more")
            assert tokens_of(generate_together(stub, requests())) == undisturbed
        (group,) = groups(cluster).values()
        assert (group.state, group.epoch) == (READY, 2), "nobody else had the worker"
        assert older.process.poll() is None
