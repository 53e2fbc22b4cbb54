"""A sequence that outgrows its worker's KV memory goes on at a larger one; no stream notices."""

from pathlib import Path

import grpc
import pytest

from tests.end_to_end.test_recovery import facts_of
from tests.support.cluster import Cluster
from tests.support.requests import fold, generate, inference_stub, reason, request_for

BLOCK_BYTES = 4 * 2 * 16 * 2 * 32 * 4
"""Of the embedded model: layers, keys and values, tokens, heads, head dimension, float32."""
SMALL, LARGE = 8, 64
"""Blocks of 16 tokens."""

WORKER = ["--dtype", "float32", "--block-size", "16"]
LONG = request_for(
    "One day",
    temperature=0.8,
    seed=3,
    max_tokens=240,
    ignore_eos=True,
    logprobs=2,
    frequency_penalty=0.1,
)
"""Twice as long as the small worker's memory."""
OCCUPANT = request_for([5 + k % 90 for k in range(140)], max_tokens=880, ignore_eos=True)
"""Fits the large worker alone, and keeps it for long."""


def start(cluster: Cluster, *sizes: int) -> None:
    """All services, with a worker of each size in blocks."""
    cluster.start_core()
    cluster.start_frontend()
    for num_blocks in sizes:
        cluster.start_worker("--kv-cache-memory", str(num_blocks * BLOCK_BYTES))
    cluster.wait_serving()
    cluster.wait_num_ready(len(sizes))


def test_a_stream_goes_on_at_a_larger_worker_as_it_would_have(
    tmp_path: Path, cluster: Cluster
) -> None:
    with inference_stub(cluster.frontend_address()) as stub:
        undisturbed = facts_of(generate(stub, LONG))
    with Cluster(tmp_path, worker_flags=WORKER, core_flags=["--max-num-seqs", "1"]) as unlike:
        start(unlike, SMALL, LARGE)
        with inference_stub(unlike.frontend_address()) as stub:
            occupant = stub.Generate(OCCUPANT, timeout=120)
            next(response for response in occupant if response.choices)
            responses = stub.Generate(LONG, timeout=120)
            answer = fold([next(response for response in responses if response.choices)])
            occupant.cancel()
            for response in responses:
                answer.add(response)
        assert facts_of(answer) == undisturbed
        assert answer.timings is not None
        assert answer.timings.recovery_us > 0
        assert unlike.core is not None
        assert "leaves a group that it has outgrown" in unlike.core.log


def test_one_that_no_worker_can_hold_fails(tmp_path: Path) -> None:
    with Cluster(tmp_path, worker_flags=WORKER) as cluster:
        start(cluster, SMALL)
        with inference_stub(cluster.frontend_address()) as stub:
            with pytest.raises(grpc.RpcError) as raised:
                generate(stub, LONG)
            assert reason(raised.value) == "KV_CACHE_TOO_SMALL"
