"""A worker that is stopped leaves at once, and no stream is affected."""

import signal
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.end_to_end.test_recovery import Facts, Streams, facts_of, requests
from tests.support.cluster import Cluster
from tests.support.requests import (
    Answer,
    fold,
    generate,
    generate_together,
    inference_stub,
    request_for,
)
from tests.support.worker_flags import FLOAT32

NUM_TOKENS = 400
SLOW = ["--simulate", "--simulate-step-us", "30000", "--served-model-name", "slow"]
"""Steps that take so long that `NUM_TOKENS` of them outlast the end of a worker by far."""
FASTER = ("--simulate-step-us", "10000")
"""For a worker that takes a stream over: its tokens are the same."""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Facts]:
    with inference_stub(cluster.frontend_address()) as stub:
        return [facts_of(answer) for answer in generate_together(stub, requests())]


@pytest.fixture
def slow_cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, worker_flags=SLOW) as cluster:
        yield cluster


class LongStream:
    """A stream that is read in the background."""

    def __init__(self, stub: InferenceServiceStub) -> None:
        self.answer = Answer()
        self.has_begun = threading.Event()
        request = request_for([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
        self._responses = stub.Generate(request, timeout=120)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._responses:
                self.answer.add(response)
                if self.answer.choices:
                    self.has_begun.set()
        finally:
            self.has_begun.set()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def wait_begun(self) -> None:
        assert self.has_begun.wait(60)

    def tokens(self) -> list[int]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.answer.token_ids


def test_streams_go_on_as_they_would_have_when_their_worker_is_stopped(
    tmp_path: Path, undisturbed: list[Facts]
) -> None:
    with Cluster(tmp_path, worker_flags=FLOAT32) as cluster:
        cluster.start(num_workers=2)
        cluster.wait_num_ready(2)
        with inference_stub(cluster.frontend_address()) as stub:
            streams = Streams(stub)
            streams.wait_started()
            cluster.workers[0].kill(signal.SIGTERM)
            assert cluster.workers[0].process.returncode == 0
            assert streams.facts() == undisturbed
        assert cluster.core is not None
        assert "worker lost" not in cluster.core.log


def test_the_last_worker_waits_for_another_and_then_leaves(slow_cluster: Cluster) -> None:
    slow_cluster.start(num_workers=1)
    with inference_stub(slow_cluster.frontend_address()) as stub:
        stream = LongStream(stub)
        stream.wait_begun()
        slow_cluster.workers[0].process.send_signal(signal.SIGTERM)
        slow_cluster.start_worker(*FASTER)
        assert slow_cluster.workers[0].wait() == 0
        assert stream.is_open
        assert len(stream.tokens()) == NUM_TOKENS


def test_a_whole_deployment_that_is_told_to_end_ends_when_its_requests_have(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, worker_flags=FLOAT32) as cluster:
        cluster.start(num_workers=2)
        cluster.wait_num_ready(2)
        with inference_stub(cluster.frontend_address()) as stub:
            request = requests()[0]
            expected = facts_of(generate(stub, request))
            responses = stub.Generate(request, timeout=120)
            answer = fold(islice(responses, 2))
            for service in cluster.services:
                service.process.send_signal(signal.SIGTERM)
            for response in responses:
                answer.add(response)
            assert facts_of(answer) == expected
        assert [service.wait() for service in cluster.services] == [0] * 4
        assert not any("grace period over" in service.log for service in cluster.services)
