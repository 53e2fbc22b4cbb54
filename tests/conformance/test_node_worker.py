"""The worker in JavaScript behind the real core: another language serves the same tokens."""

from pathlib import Path

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.processes import node_worker
from tests.support.requests import generate, generate_together, inference_stub, request_for

NUM_REQUESTS = 8
NUM_TOKENS = 40
NUM_BLOCKS = 40
"""Of 8 tokens each: too few for all requests at once."""


def requests() -> list[pb.GenerateRequest]:
    """Two choices each, with most of what a sampler is asked for."""
    return [
        request_for(
            [1 + (7 * index + at) % 63 for at in range(5 + 3 * index)],
            n=2,
            temperature=0.9,
            top_p=0.95,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=3,
            seed=100 + index,
            max_tokens=NUM_TOKENS,
            logprobs=2,
        )
        for index in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--blocks", str(NUM_BLOCKS)],
        ["--blocks", str(3 * NUM_BLOCKS), "--cache-groups", "growing:8,window:8:24,state:2"],
    ],
)
def test_requests_get_the_same_tokens_together_and_preempted_as_alone(
    flags: list[str], tmp_path: Path
) -> None:
    with Cluster(tmp_path) as cluster:
        addresses = ["--core", cluster.core_address, "--listen", f"unix:{tmp_path}/node.sock"]
        cluster.start_core()
        cluster.start_frontend()
        cluster.start_foreign_worker(node_worker(*addresses, *flags))
        cluster.wait_serving()
        with inference_stub(cluster.frontend_address()) as stub:
            together = generate_together(stub, requests())
            alone = [generate(stub, request) for request in requests()]
        assert cluster.core is not None
        assert "preempted" in cluster.core.log
    for answer, expected in zip(together, alone, strict=True):
        assert sorted(answer.choices) == [0, 1]
        for index, choice in answer.choices.items():
            assert choice.token_ids == expected.choices[index].token_ids
            assert choice.logprobs == expected.choices[index].logprobs
            assert choice.finish_reason == pb.FINISH_REASON_LENGTH
            assert len(choice.token_ids) == NUM_TOKENS
        assert answer.choices[0].token_ids != answer.choices[1].token_ids
