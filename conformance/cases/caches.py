"""New caches, and the steps that use them."""

import grpc

from conformance.assertions import Skipped, expect
from conformance.case import case
from conformance.worker import Worker
from pagewire.v1 import worker_service_pb2 as pb


@case("worker_service", "and so is a stream before the first InitializeCache")
def a_stream_before_the_first_cache_is_refused(worker: Worker) -> None:
    if not worker.is_fresh:
        raise Skipped("the worker has had caches; restart it to run this case")
    with worker.stream(worker.next_epoch()) as stream:
        stream.send(stream.new(worker.prompt(1)))
        stream.call.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


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


@case("worker_service", "In device memory, at least 1")
def a_cache_may_be_smaller_than_what_fits(worker: Worker) -> None:
    prompt = worker.prompt(1)
    num_blocks = worker.num_blocks_for(len(prompt) + 2)
    epoch = worker.next_epoch()
    request = pb.InitializeCacheRequest(num_gpu_blocks=num_blocks, epoch=epoch)
    worker.stub.InitializeCache(request, timeout=worker.timeout_s)
    with worker.stream(epoch) as stream:
        sequence = stream.generate(stream.new(prompt), 2)
        stream.send(stream.new(worker.prompt(2), blocks=[num_blocks]))
        stream.call.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences", "block")
    worker.expect_as_alone("a sequence that fills the cache", sequence)
