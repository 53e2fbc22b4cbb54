"""Bad input and faults: a clear error for that request, and a healthy service after it."""

from pathlib import Path

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.cluster import SERVING, Cluster, health
from tests.support.requests import (
    fold,
    generate,
    inference_stub,
    reason,
    request_for,
)
from tests.support.waiting import wait_until
from tests.support.worker_flags import FLOAT32

GREETING = request_for("Once upon a time", temperature=0, max_tokens=4)


def refused(stub: InferenceServiceStub, request: pb.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        generate(stub, request)
    assert len(generate(stub, GREETING).token_ids) == 4
    return error.value


def test_a_prompt_longer_than_memory_is_refused_and_shorter_ones_go_on(
    stub: InferenceServiceStub, tmp_path: Path
) -> None:
    model = stub.GetModel(pb.GetModelRequest()).model
    token_bytes = model.block_bytes // model.cache_groups[0].block_tokens
    memory = ["--block-size", "16", "--kv-cache-memory", str(64 * token_bytes)]
    flags = ["--dtype", "float32", *memory]
    with Cluster(tmp_path, worker_flags=flags) as small:
        small.start()
        with inference_stub(small.frontend_address()) as small_stub:
            error = refused(small_stub, request_for([5] * 100, max_tokens=4))
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert reason(error) == "PROMPT_LARGER_THAN_CACHE"


def num_free_blocks(stub: InferenceServiceStub) -> tuple[int, int]:
    group = stub.GetStatus(pb.GetStatusRequest()).status.groups[0]
    return group.num_free_gpu_blocks, group.num_gpu_blocks


def test_a_client_that_leaves_frees_its_blocks(stub: InferenceServiceStub) -> None:
    stream = stub.Generate(request_for("Once", max_tokens=900, ignore_eos=True, temperature=0))
    responses = iter(stream)
    while not next(responses).choices:
        pass
    free, total = num_free_blocks(stub)
    assert free < total
    stream.cancel()
    wait_until(lambda: num_free_blocks(stub) == (total, total), "all blocks are free")


def test_a_deadline_ends_the_stream_and_frees_its_blocks(stub: InferenceServiceStub) -> None:
    request = request_for("Once", max_tokens=900, ignore_eos=True, temperature=0)
    with pytest.raises(grpc.RpcError) as error:
        generate(stub, request, timeout_s=0.3)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    total = num_free_blocks(stub)[1]
    wait_until(lambda: num_free_blocks(stub) == (total, total), "all blocks are free")


def test_requests_wait_for_a_worker_until_their_deadline(tmp_path: Path) -> None:
    with Cluster(tmp_path, worker_flags=FLOAT32) as late:
        late.start_core()
        late.start_frontend()
        wait_until(lambda: health(late.frontend_address()) is not None, "the frontend answers")
        assert health(late.frontend_address()) != SERVING
        with inference_stub(late.frontend_address()) as stub:
            with pytest.raises(grpc.RpcError) as error:
                generate(stub, GREETING, timeout_s=0.5)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            stream = stub.Generate(GREETING, timeout=90)
            late.start_worker()
            assert len(fold(stream).token_ids) == 4
        late.wait_serving()
