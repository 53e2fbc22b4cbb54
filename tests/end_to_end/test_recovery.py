"""Any process can be killed, and the stream goes on with the tokens it would have had, their text,
their log probabilities and its end."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.support.cluster import Cluster
from tests.support.requests import Answer, generate_together, inference_stub, request_for
from tests.support.worker_flags import FLOAT32

NUM_STREAMS = 6
STOP = ["and that was all", "never to be seen", "happy ever after", "The end"]
"""Phrases of which the beginnings are common: their matching is under way at any time."""

Facts = list[object]
"""Of an answer, all that must be the same."""


def requests() -> list[pb.GenerateRequest]:
    """Sampled requests, with everything that depends on which tokens were generated and which
    given; and requests that return nothing before their end."""
    sampled = {"temperature": 0.8, "seed": 11, "max_tokens": 400}
    streamed = [
        request_for(
            "Once upon a time",
            temperature=0.8,
            seed=seed,
            max_tokens=400,
            ignore_eos=True,
            repetition_penalty=1.05,
            frequency_penalty=0.1,
            n=1 + seed % 2,
            logprobs=1,
        )
        for seed in range(NUM_STREAMS)
    ]
    beams = {"width": 3, "length_penalty": 0.5}
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}
    return [
        *streamed,
        request_for("One day", min_tokens=300, logprobs=2, **sampled),
        request_for("One day", stop=STOP, ignore_eos=True, presence_penalty=0.4, **sampled),
        request_for([5 + k % 90 for k in range(600)], prompt_logprobs=1, **sampled),
        request_for("One day", beam_search=beams, n=2, max_tokens=200, ignore_eos=True),
        request_for("One day", best_of=3, n=2, seed=5, max_tokens=200, ignore_eos=True),
        request_for("One day", json_schema=json.dumps(numbers), n=2, logprobs=0, **sampled),
        request_for("One day", regex="[a-z ,.]{600}", frequency_penalty=0.3, **sampled),
        request_for("One day", regex="[a-z ,.]{400}", thought={"ends": ["and", "."]}, **sampled),
        request_for("One day", beam_search=beams, regex="(?:[a-m]|[ -/]){200}", max_tokens=150),
    ]


class Streams:
    """Streams read in the background; `started` counts those that are streamed and have begun."""

    def __init__(self, stub: InferenceServiceStub) -> None:
        self.errors: list[Exception] = []
        self.started = threading.Semaphore(0)
        streams = [stub.Generate(request, timeout=120) for request in requests()]
        self.answers = [Answer() for _ in streams]
        self.threads = [
            threading.Thread(target=self._read, args=(stream, answer))
            for stream, answer in zip(streams, self.answers, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, stream: Iterator[pb.GenerateResponse], answer: Answer) -> None:
        told = False
        try:
            for response in stream:
                answer.add(response)
                if not told and answer.choices and len(answer.token_ids) > 20:
                    told = True
                    self.started.release()
        except Exception as error:
            self.errors.append(error)
        finally:
            if not told:
                self.started.release()

    def wait_started(self) -> None:
        for _ in range(NUM_STREAMS):
            assert self.started.acquire(timeout=60)

    def facts(self) -> list[Facts]:
        for thread in self.threads:
            thread.join(timeout=120)
        assert self.errors == []
        return [facts_of(answer) for answer in self.answers]


def facts_of(answer: Answer) -> Facts:
    assert answer.usage is not None
    choices = [answer.choices[index] for index in sorted(answer.choices)]
    return [
        answer.prompt_logprobs,
        answer.usage.completion_tokens,
        *((c.token_ids, c.text, c.logprobs, c.finish_reason) for c in choices),
    ]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Facts]:
    with inference_stub(cluster.frontend_address()) as stub:
        return [facts_of(answer) for answer in generate_together(stub, requests())]


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, worker_flags=FLOAT32) as victims:
        yield victims


def test_streams_survive_a_killed_worker_on_another_one(
    victims: Cluster, undisturbed: list[Facts]
) -> None:
    victims.start(num_workers=2)
    with inference_stub(victims.frontend_address()) as stub:
        streams = Streams(stub)
        streams.wait_started()
        victims.workers[0].kill()
        assert streams.facts() == undisturbed


def worker_info(cluster: Cluster) -> worker_pb.GetInfoResponse:
    with grpc.insecure_channel(f"unix:{cluster.folder}/worker-0.sock") as channel:
        return WorkerServiceStub(channel).GetInfo(worker_pb.GetInfoRequest(), timeout=60)


def test_streams_survive_two_killed_cores_and_the_worker_keeps_its_weights(
    victims: Cluster, undisturbed: list[Facts]
) -> None:
    victims.start()
    before = worker_info(victims)
    with inference_stub(victims.frontend_address()) as stub:
        streams = Streams(stub)
        streams.wait_started()
        for _ in range(2):
            assert victims.core is not None
            victims.core.kill()
            victims.start_core()
            victims.wait_attached()
        assert streams.facts() == undisturbed
    after = worker_info(victims)
    assert (after.pid, after.num_weight_loads) == (before.pid, 1)
    assert after.last_epoch > before.last_epoch
