"""Two models on one core: each request gets its own model's tokens, or an error that names them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.end_to_end.conftest import Reference
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster
from tests.support.requests import fold, inference_stub, request_for
from tests.support.worker_flags import FLOAT32
from tools.launch import Service

EMBEDDED, TINY = "embedded", "tiny"
ALIAS = "tiny-again"
PROMPT = "Once upon a time"
NUM_TOKENS = 24


class TwoModels:
    """A cluster with a worker for each."""

    def __init__(self, cluster: Cluster, checkpoint: Path) -> None:
        self.cluster = cluster
        self.checkpoint = checkpoint
        cluster.start()
        self.tiny_worker = self.start_tiny_worker()
        with inference_stub(cluster.frontend_address()) as stub:
            wait_for_models(stub, EMBEDDED, TINY)

    def start_tiny_worker(self) -> Service:
        """Another worker for the second model."""
        return self.cluster.start_worker(
            *("--model", str(self.checkpoint)),
            *("--served-model-name", TINY, "--served-model-name", ALIAS),
        )


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    folder = tmp_path_factory.mktemp("models")
    checkpoint = make_checkpoint("llama", folder / "checkpoint")
    with Cluster(folder, worker_flags=[*FLOAT32, "--threads", "1"]) as cluster:
        yield TwoModels(cluster, checkpoint)


@pytest.fixture
def stub(two_models: TwoModels) -> Iterator[InferenceServiceStub]:
    with inference_stub(two_models.cluster.frontend_address()) as stub:
        yield stub


def wait_for_models(stub: InferenceServiceStub, *names: str) -> None:
    """Wait until these are served, and no others."""
    for response in stub.WatchStatus(pb.WatchStatusRequest(interval_ms=100), timeout=120):
        if list(response.status.models) == list(names):
            return
    raise AssertionError("the stream of snapshots ended")


def request(model: str | None, prompt: str | list[int] = PROMPT) -> pb.GenerateRequest:
    """For greedy tokens, as many as asked for."""
    message = request_for(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    if model is not None:
        message.model = model
    return message


def test_each_request_gets_the_tokens_of_its_own_model(
    two_models: TwoModels, stub: InferenceServiceStub, reference: Reference
) -> None:
    prompt = list(PROMPT.encode())
    tiny = AutoModelForCausalLM.from_pretrained(two_models.checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = tiny.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    expected = {
        EMBEDDED: reference.greedy(reference.encode(PROMPT), NUM_TOKENS, ignore_eos=True),
        TINY: output[0, len(prompt) :].tolist(),
    }
    requests = [request(EMBEDDED), request(TINY, prompt)] * 4
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda one: fold(stub.Generate(one, timeout=120)), requests))
    for message, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == expected[message.model]
        assert answer.started is not None
        assert answer.started.model == message.model


def test_status_and_facts_tell_the_models_apart(stub: InferenceServiceStub) -> None:
    status = stub.GetStatus(pb.GetStatusRequest(), timeout=60).status
    assert sorted(group.model for group in status.groups) == [EMBEDDED, TINY]
    facts = [stub.GetModel(pb.GetModelRequest(model=name)).model for name in (EMBEDDED, TINY)]
    assert facts[0].fingerprint != facts[1].fingerprint
    ids = [
        stub.Tokenize(pb.TokenizeRequest(model=name, text=PROMPT)).token_ids
        for name in (EMBEDDED, TINY)
    ]
    assert list(ids[0]) != list(ids[1])


def test_a_model_answers_to_its_other_name_under_its_first(stub: InferenceServiceStub) -> None:
    first, other = (fold(stub.Generate(request(name), timeout=120)) for name in (TINY, ALIAS))
    assert other.token_ids == first.token_ids
    assert other.started is not None
    assert other.started.model == TINY


def test_a_model_that_is_not_served_is_not_found_and_those_that_are_are_named(
    stub: InferenceServiceStub,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        fold(stub.Generate(request("other"), timeout=60))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    available = f"{EMBEDDED}, {TINY}, {ALIAS}"
    assert caught.value.details() == f"unknown model 'other'; available models: {available}"


def test_without_a_name_the_request_is_refused_and_those_there_are_are_named(
    stub: InferenceServiceStub,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        fold(stub.Generate(request(None), timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "several are served: embedded, tiny" in caught.value.details()


def test_a_model_whose_last_worker_died_is_waited_for_until_the_deadline(
    two_models: TwoModels, stub: InferenceServiceStub
) -> None:
    two_models.tiny_worker.kill()
    wait_for_models(stub, EMBEDDED)
    with pytest.raises(grpc.RpcError) as caught:
        fold(stub.Generate(request(TINY), timeout=1))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    waiting = stub.Generate(request(TINY), timeout=120)
    assert len(fold(stub.Generate(request(EMBEDDED), timeout=60)).token_ids) == NUM_TOKENS
    two_models.tiny_worker = two_models.start_tiny_worker()
    assert len(fold(waiting).token_ids) == NUM_TOKENS
