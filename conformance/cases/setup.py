"""The unary calls that count blocks and make the caches."""

import grpc

from conformance.assertions import Skipped, expect, expect_true
from conformance.cache_groups import block_tokens
from conformance.case import case
from conformance.worker import Worker
from pagewire.v1 import worker_service_pb2 as pb


@case("worker_service", "Measures how many KV blocks fit")
def at_least_one_block_fits(worker: Worker) -> None:
    block_tokens(worker.groups)
    expect_true(worker.blocks.num_gpu_blocks >= 1, "ProfileBlocks found room for no block")


@case("worker_service", "In device memory; 0 for a model without cache groups.")
def a_model_without_cache_groups_has_no_blocks(worker: Worker) -> None:
    if worker.groups:
        raise Skipped("the model has cache groups")
    expect("num_gpu_blocks", worker.blocks.num_gpu_blocks, 0)
    expect("num_cpu_blocks", worker.blocks.num_cpu_blocks, 0)


@case("worker_service", "Refused with INVALID_ARGUMENT unless 1 <= max_num_seqs")
def a_profile_of_no_sequences_is_refused(worker: Worker) -> None:
    request = pb.ProfileBlocksRequest(max_num_seqs=0, max_num_batched_tokens=16)
    worker.refusal(worker.stub.ProfileBlocks, request).expect(grpc.StatusCode.INVALID_ARGUMENT)


@case("worker_service", "1 <= max_num_seqs <= max_num_batched_tokens")
def a_profile_with_fewer_tokens_than_sequences_is_refused(worker: Worker) -> None:
    request = pb.ProfileBlocksRequest(max_num_seqs=16, max_num_batched_tokens=15)
    worker.refusal(worker.stub.ProfileBlocks, request).expect(grpc.StatusCode.INVALID_ARGUMENT)


@case("worker_service", "with INVALID_ARGUMENT if there are no device blocks")
def a_cache_without_device_blocks_is_refused(worker: Worker) -> None:
    """Or one with blocks, where there are no groups."""
    number = int(not worker.groups)
    request = pb.InitializeCacheRequest(num_gpu_blocks=number, epoch=worker.next_epoch())
    worker.refusal(worker.stub.InitializeCache, request).expect(grpc.StatusCode.INVALID_ARGUMENT)
