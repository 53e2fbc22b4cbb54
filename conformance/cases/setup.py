"""Counting blocks, making the caches, and the order of the calls."""

import grpc

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import case
from conformance.worker import Worker
from pagewire.v1 import worker_service_pb2 as pb


@case("worker_service", "and so is a stream before the first InitializeCache")
def a_stream_before_the_first_cache_is_refused(worker: Worker) -> None:
    if not worker.is_fresh:
        raise Skipped("the worker has had caches; restart it to run this case")
    with worker.stream(worker.next_epoch()) as stream:
        stream.send(stream.new(worker.prompt(1)))
        stream.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@case("worker_service", "Measures how many KV blocks fit")
def at_least_one_block_fits(worker: Worker) -> None:
    expect_true(worker.blocks.num_gpu_blocks >= 1, "ProfileBlocks found room for no block")


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
    request = pb.InitializeCacheRequest(num_gpu_blocks=0, epoch=worker.next_epoch())
    worker.refusal(worker.stub.InitializeCache, request).expect(grpc.StatusCode.INVALID_ARGUMENT)


@case("worker_service", "Refused with ABORTED if the epoch is not greater than any before")
def a_cache_for_an_older_epoch_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        for epoch in (stream.epoch, stream.epoch - 1, 0):
            request = worker.cache_request(epoch)
            worker.refusal(worker.stub.InitializeCache, request).expect(grpc.StatusCode.ABORTED)
        sequence = stream.generate(stream.new(worker.prompt(1)), 2)
    worker.expect_as_alone("the stream of the epoch that holds", sequence)


@case("worker_service", "Weights stay loaded.")
def new_caches_do_not_load_the_weights_again(worker: Worker) -> None:
    before = worker.get_info().num_weight_loads
    for _ in range(2):
        with worker.open() as stream:
            stream.prefilled(worker.prompt(1))
    expect("num_weight_loads", worker.get_info().num_weight_loads, before)


@case("worker_service", "In device memory, at least 1.")
def a_cache_may_be_smaller_than_what_fits(worker: Worker) -> None:
    prompt = worker.prompt(1)
    num_blocks = -(-(len(prompt) + 2) // worker.block_size)
    epoch = worker.next_epoch()
    request = pb.InitializeCacheRequest(num_gpu_blocks=num_blocks, epoch=epoch)
    worker.stub.InitializeCache(request, timeout=worker.timeout_s)
    with worker.stream(epoch) as stream:
        sequence = stream.generate(stream.new(prompt), 2)
        stream.send(stream.new(worker.prompt(2), blocks=[num_blocks]))
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences", "block")
    worker.expect_as_alone("a sequence that fills the cache", sequence)
