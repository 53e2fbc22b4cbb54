"""Simulated workers under a real scheduler core and frontend."""

import time
from pathlib import Path

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_kernels.philox import draw_bits
from tests.support.cluster import Cluster
from tests.support.requests import Answer, generate_together, inference_stub, request_for
from worker_service.simulated.model import START, NextToken, extend

NUM_REQUESTS = 50
NUM_TOKENS = 120
VOCAB_SIZE = 5000
FLAGS = ["--simulate", "--simulate-vocab-size", str(VOCAB_SIZE), "--max-model-len", "512"]


SPECULATIVE = ["--speculative", "ngram"]
SPECULATING_CORE = ["--max-speculative-seqs", "256"]


def requests() -> list[pb.GenerateRequest]:
    """Two choices each; prompts of many lengths, some sharing a beginning."""
    return [
        request_for(
            [1 + index % 3, *range(3 + 2 * index)],
            n=2,
            temperature=1.0,
            seed=1000 + index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        for index in range(NUM_REQUESTS)
    ]


def expected(request: pb.GenerateRequest, choice_index: int) -> list[int]:
    """The tokens that a choice must get, from the definition of the simulated model."""
    seed = request.sampling_params.seed
    history = START
    for token in request.token_ids.ids:
        history = extend(history, token)
    tokens = []
    for position in range(NUM_TOKENS):
        bits = draw_bits(seed, choice_index, position)
        tokens.append(NextToken(history, VOCAB_SIZE).drawn(bits))
        history = extend(history, tokens[-1])
    return tokens


def check(answers: list[Answer]) -> None:
    """Every choice of every request ended at its length, with its tokens."""
    for request, answer in zip(requests(), answers, strict=True):
        assert sorted(answer.choices) == [0, 1]
        for index, choice in answer.choices.items():
            assert choice.finish_reason == pb.FINISH_REASON_LENGTH
            assert choice.token_ids == expected(request, index)


def start(cluster: Cluster) -> None:
    """Start two workers under a core and a frontend; return once both can be given work."""
    cluster.start(num_workers=2)
    deadline = time.monotonic() + 30
    while not all("cache initialised" in worker.log for worker in cluster.workers):
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.02)


@pytest.mark.parametrize("num_gpu_blocks", [4096, 96])
def test_requests_get_their_tokens_with_plenty_and_with_little_memory(
    tmp_path: Path, num_gpu_blocks: int
) -> None:
    flags = [*FLAGS, "--simulate-gpu-blocks", str(num_gpu_blocks)]
    with Cluster(tmp_path, worker_flags=flags) as cluster:
        start(cluster)
        with inference_stub(cluster.frontend_address()) as stub:
            check(generate_together(stub, requests()))
            status = stub.GetStatus(pb.GetStatusRequest()).status
        assert (status.num_swapped_in_blocks > 0) == (num_gpu_blocks == 96)
        for worker in cluster.workers:
            assert worker.log.count("step stream opened") == 1  # no plan was refused
        if num_gpu_blocks == 96:
            assert cluster.core is not None
            assert "preempted" in cluster.core.log


@pytest.mark.parametrize("num_gpu_blocks", [4096, 96])
def test_requests_get_the_same_tokens_with_drafts(tmp_path: Path, num_gpu_blocks: int) -> None:
    flags = [*FLAGS, *SPECULATIVE, "--simulate-gpu-blocks", str(num_gpu_blocks)]
    flags += ["--log-level", "debug"]
    with Cluster(tmp_path, worker_flags=flags, core_flags=SPECULATING_CORE) as cluster:
        start(cluster)
        with inference_stub(cluster.frontend_address()) as stub:
            check(generate_together(stub, requests()))
        for worker in cluster.workers:
            assert worker.log.count("step stream opened") == 1  # no plan was refused
            if num_gpu_blocks == 4096:
                assert worker.log.count("step done") < NUM_TOKENS, "no draft was kept"
