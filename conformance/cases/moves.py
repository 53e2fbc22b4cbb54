"""Leases and fetches. The worker fetches from itself, and from the kit, which passes on what the
worker sends, or something else."""

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

import grpc

from conformance.assertions import Failed, Skipped, expect, expect_true
from conformance.case import case, refusal_case
from conformance.cases.cache_operations import overwrite
from conformance.cases.swaps import require_host_blocks
from conformance.sequence import Sequence
from conformance.step_result import Result
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb

TOKEN = bytes(range(16))
DIGEST_BYTES = 16
TIMEOUT_MS = 60_000

READ = "Returns blocks that the core has leased (StepPlan.leases)."
DENIED = "with PERMISSION_DENIED unless the token is that of a"
FETCH = "The copy of some blocks of another worker group of the same model"
DIGEST = "XXH3-128 (big-endian) of the block's key followed by the block's"

Parts = Iterator[pb.ReadBlocksResponse]


def keys_of(count: int, first: int = 1) -> bytes:
    """Keys of some blocks, all different."""
    return b"".join(number.to_bytes(16, "big") for number in range(first, first + count))


def moving(worker: Worker) -> None:
    """Raises Skipped for a worker that moves no blocks."""
    if not worker.info.moves_blocks:
        raise Skipped("the worker moves no blocks")


def lease(blocks: list[int], **fields: Any) -> plan_pb2.BlockLease:
    """Lease 1 of some blocks."""
    values: dict[str, Any] = {"lease_id": 1, "token": TOKEN, "keys": keys_of(len(blocks))}
    values |= {"block_ids": columns.pack(blocks), "timeout_ms": TIMEOUT_MS}
    return plan_pb2.BlockLease(**values | fields)


def fetch(
    stream: StepStream, address: str, pairs: list[tuple[int, int]], **fields: Any
) -> plan_pb2.BlockFetch:
    """Fetch 1, of blocks of lease 1 of the same stream."""
    values: dict[str, Any] = {
        "fetch_id": 1,
        "lease_id": 1,
        "token": TOKEN,
        "source_epoch": stream.epoch,
    }
    values |= {"addresses": [address], "blocks": columns.pack_rows(pairs)}
    values |= {"keys": keys_of(len(pairs)), "timeout_ms": TIMEOUT_MS}
    return plan_pb2.BlockFetch(**values | fields)


def send(stream: StepStream, **fields: Any) -> Result:
    """The result of a plan that has only leases or fetches."""
    plan = stream.plan()
    plan.MergeFrom(plan_pb2.StepPlan(**fields))
    stream.send_plan(plan)
    return stream.receive()


def end_of(worker: Worker, stream: StepStream, wanted: plan_pb2.BlockFetch) -> plan_pb2.FetchResult:
    """The end of a fetch, which is waited for with plans that do nothing else."""
    result = send(stream, fetches=[wanted])
    deadline = time.monotonic() + worker.timeout_s
    while not result.message.fetches:
        expect_true(time.monotonic() < deadline, "the end of a fetch was never reported")
        result = stream.step()
    (ended,) = result.message.fetches
    expect("the fetch_id of the fetch's result", ended.fetch_id, wanted.fetch_id)
    return ended


def expect_failure(found: plan_pb2.FetchResult, *names: str) -> None:
    """Fail unless a fetch failed for one of these reasons."""
    name = plan_pb2.FetchFailure.Name(found.failure).removeprefix("FETCH_FAILURE_")
    expect_true(name in names, f"expected the failure {' or '.join(names)}, got {name}")


def expect_arrived(found: plan_pb2.FetchResult) -> None:
    """Fail unless all blocks of a fetch arrived."""
    name = plan_pb2.FetchFailure.Name(found.failure)
    expect_true(found.failure == 0, f"expected no failure, got {name}: {found.message}")


def prefix(worker: Worker, stream: StepStream) -> tuple[Sequence, list[int]]:
    """A sequence, and its full blocks."""
    moving(worker)
    prompt = worker.prompt(1)
    sequence = stream.prefilled(prompt)
    return sequence, sequence.blocks[: stream.num_full_blocks(prompt)]


def request(stream: StepStream, blocks: list[int], **fields: Any) -> pb.ReadBlocksRequest:
    """A reader's request for blocks of lease 1."""
    values: dict[str, Any] = {"epoch": stream.epoch, "lease_id": 1, "token": TOKEN}
    return pb.ReadBlocksRequest(**values | {"block_ids": columns.pack(blocks)} | fields)


def read(worker: Worker, wanted: pb.ReadBlocksRequest) -> tuple[bytes, bytes]:
    """The bytes and the digests of blocks."""
    parts = list(worker.stub.ReadBlocks(wanted, timeout=worker.timeout_s))
    return b"".join(part.data for part in parts), b"".join(part.digests for part in parts)


def expect_refused(worker: Worker, wanted: pb.ReadBlocksRequest, code: grpc.StatusCode) -> None:
    """Fail unless a reader is refused with this status."""
    refusal = worker.refusal(
        lambda r, timeout: list(worker.stub.ReadBlocks(r, timeout=timeout)), wanted
    )
    refusal.expect(code)


@case("worker_service", DIGEST)
def a_leased_block_is_sent_with_its_digest(worker: Worker) -> None:
    try:
        import xxhash
    except ImportError:
        raise Skipped("the package xxhash is not installed") from None
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        send(stream, leases=[lease(blocks)])
        data, digests = read(worker, request(stream, blocks))
        expect("the number of bytes of digests", len(digests), len(blocks) * DIGEST_BYTES)
        expect("the rest of the bytes for each block", len(data) % len(blocks), 0)
        size = len(data) // len(blocks)
        for index in range(len(blocks)):
            key = keys_of(1, first=1 + index)
            block = data[index * size : (index + 1) * size]
            wanted = xxhash.xxh3_128(key + block, seed=int.from_bytes(key[:8], "little")).digest()
            found = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            expect(f"the digest of block {index} of the request", found.hex(), wanted.hex())


@case("worker_service", DENIED)
def blocks_without_a_lease_are_refused(worker: Worker) -> None:
    denied = grpc.StatusCode.PERMISSION_DENIED
    with worker.open() as stream, futures.ThreadPoolExecutor(max_workers=1) as pool:
        _, blocks = prefix(worker, stream)
        other = request(stream, blocks[:1], lease_id=2)  # may be waited for, and never begins
        refused = pool.submit(expect_refused, worker, other, denied)
        futures.wait([refused], timeout=0.1)  # while there is no lease at all
        send(stream, leases=[lease(blocks[:1])])
        read(worker, request(stream, blocks[:1]))
        expect_refused(worker, request(stream, blocks), denied)
        expect_refused(worker, request(stream, blocks[:1], token=bytes(16)), denied)
        refused.result()


def read_early(
    worker: Worker, wanted: pb.ReadBlocksRequest, begin: Callable[[], object]
) -> tuple[bytes, bytes]:
    """What a reader gets that comes before `begin`, which begins its lease."""
    with futures.ThreadPoolExecutor(max_workers=1) as pool:
        early = pool.submit(read, worker, wanted)
        with suppress(TimeoutError):
            early.result(timeout=0.1)  # nothing announces that the call has reached the worker
        begin()
        try:
            return early.result()
        except grpc.RpcError as error:
            raise Failed(f"the reader was refused: {error.code().name}") from None


@case("worker_service", "A reader whose lease has not begun is not refused at")
def a_reader_waits_for_its_lease_to_begin(worker: Worker) -> None:
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        wanted = request(stream, blocks)
        found = read_early(worker, wanted, lambda: send(stream, leases=[lease(blocks)]))
        expect_true(found == read(worker, wanted), "it read something else")


@case("plan", "copy, begin leases, begin fetches, take in new sequences, append tokens, apply")
def a_lease_of_what_its_plan_swaps_out_is_read_after_that(worker: Worker) -> None:
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        require_host_blocks(stream, 1)
        send(stream, leases=[lease(blocks[:1])])
        expected = read(worker, request(stream, blocks[:1]))
        out, leases = columns.pack([blocks[0], 0]), [lease([~0], lease_id=2)]
        wanted = request(stream, [~0], lease_id=2)
        found = read_early(worker, wanted, lambda: send(stream, swap_out=out, leases=leases))
        expect_true(found == expected, "a reader got what was there before the swap-out")


@case("worker_service", "Refused with FAILED_PRECONDITION if the epoch is not that of the worker's")
def another_epoch_or_rank_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        send(stream, leases=[lease(blocks)])
        for wrong in ({"epoch": stream.epoch - 1}, {"epoch": stream.epoch + 1}, {"rank": 1}):
            wanted = request(stream, blocks, **wrong)
            expect_refused(worker, wanted, grpc.StatusCode.FAILED_PRECONDITION)


@case("plan", "Leases that the worker serves no longer, those that have expired too")
def a_lease_that_has_ended_or_expired_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        send(stream, leases=[lease(blocks), lease(blocks, lease_id=2, timeout_ms=1)])
        time.sleep(0.002)  # the limit itself: nothing announces that a lease has expired
        denied = grpc.StatusCode.PERMISSION_DENIED
        expect_refused(worker, request(stream, blocks, lease_id=2), denied)
        send(stream, ended_lease_ids=columns.pack([1, 2]))
        expect_refused(worker, request(stream, blocks), denied)
        send(stream, leases=[lease(blocks)])  # its number is free again
        read(worker, request(stream, blocks))


@case("plan", FETCH)
def fetched_blocks_serve_as_a_prefix(worker: Worker) -> None:
    with worker.open() as stream:
        first, blocks = prefix(worker, stream)
        targets = stream.blocks.take(len(blocks))
        send(stream, leases=[lease(blocks)])
        pairs = list(zip(blocks, targets, strict=True))
        expect_arrived(end_of(worker, stream, fetch(stream, worker.address, pairs)))
        send(stream, ended_lease_ids=columns.pack([1]))
        companion = stream.new(worker.prompt(41))
        stream.step(companion, forget=[first])
        overwrite(stream, worker, first.blocks, companion)
        second = stream.generate(stream.borrowed(worker.prompt(1), targets), 3)
    worker.expect_as_alone("a sequence with a fetched prefix", second)


@case("plan", "A block did not have the digest that the source computed with the block's key.")
def a_fetch_with_other_keys_than_the_lease_fails(worker: Worker) -> None:
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        pairs = list(zip(blocks, stream.blocks.take(len(blocks)), strict=True))
        send(stream, leases=[lease(blocks)])
        wrong = fetch(stream, worker.address, pairs, keys=keys_of(len(pairs), first=2))
        expect_failure(end_of(worker, stream, wrong), "DIGEST_MISMATCH")


@case("plan", "The source refused: the lease is foreign, over or of another epoch.")
def a_fetch_without_a_lease_is_denied(worker: Worker) -> None:
    with worker.open() as stream:
        _, blocks = prefix(worker, stream)
        pairs = list(zip(blocks, stream.blocks.take(len(blocks)), strict=True))
        expect_failure(end_of(worker, stream, fetch(stream, worker.address, pairs)), "DENIED")


@contextmanager
def relay(worker: Worker, change: Callable[[Parts], Parts]) -> Iterator[str]:
    """The address of a source that passes on what the worker sends, after a change."""

    def read_blocks(request: pb.ReadBlocksRequest, context: grpc.ServicerContext) -> Parts:
        request.ClearField("reader")  # the worker's bytes, never its addresses
        yield from change(worker.stub.ReadBlocks(request, timeout=worker.timeout_s))

    handler = grpc.unary_stream_rpc_method_handler(
        read_blocks,
        request_deserializer=pb.ReadBlocksRequest.FromString,
        response_serializer=pb.ReadBlocksResponse.SerializeToString,
    )
    service = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"ReadBlocks": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def relayed(worker: Worker, change: Callable[[Parts], Parts], **fields: Any) -> Any:
    """The end of a fetch from a relay. Raises Skipped if the worker cannot reach the kit."""
    with worker.open() as stream, relay(worker, change) as address:
        _, blocks = prefix(worker, stream)
        pairs = list(zip(blocks, stream.blocks.take(len(blocks)), strict=True))
        send(stream, leases=[lease(blocks)])
        found = end_of(worker, stream, fetch(stream, address, pairs, **fields))
    if found.failure == plan_pb2.FETCH_FAILURE_UNREACHABLE:
        raise Skipped("the worker cannot call the kit")
    return found


@case("plan", "A block did not have the digest that the source computed with the block's key.")
def a_flipped_bit_is_found(worker: Worker) -> None:
    def flip(parts: Parts) -> Parts:
        for part in parts:
            if part.data:
                part.data = bytes([part.data[0] ^ 1]) + part.data[1:]
            yield part

    expect_failure(relayed(worker, flip), "DIGEST_MISMATCH")


@case("plan", "The source's answer was not what the protocol prescribes, such as too few bytes.")
def a_truncated_answer_is_found(worker: Worker) -> None:
    def cut(parts: Parts) -> Parts:
        for part in parts:
            yield pb.ReadBlocksResponse(data=part.data[:-1])
            return

    expect_failure(relayed(worker, cut), "MALFORMED", "DIGEST_MISMATCH")


@case("plan", "After which time the fetch fails, from the plan's arrival, in milliseconds")
def a_silent_source_makes_a_fetch_fail_in_time(worker: Worker) -> None:
    released = Event()

    def wait(parts: Parts) -> Parts:
        released.wait(worker.timeout_s)
        yield from parts

    try:
        expect_failure(relayed(worker, wait, timeout_ms=200), "TIMED_OUT", "STALLED")
    finally:
        released.set()


@case("plan", "from then on the worker writes to them no longer.")
def nothing_is_written_after_the_end_of_a_fetch(worker: Worker) -> None:
    """Targets of a fetch that failed hold another sequence when the source sends at last."""
    released, sent = Event(), Event()

    def wait(parts: Parts) -> Parts:
        released.wait(worker.timeout_s)
        yield from parts
        sent.set()

    with worker.open() as stream, relay(worker, wait) as address:
        first, blocks = prefix(worker, stream)
        targets = stream.blocks.take(len(blocks))
        send(stream, leases=[lease(blocks)])
        pairs = list(zip(blocks, targets, strict=True))
        found = end_of(worker, stream, fetch(stream, address, pairs, timeout_ms=200))
        if found.failure == plan_pb2.FETCH_FAILURE_UNREACHABLE:
            raise Skipped("the worker cannot call the kit")
        expect_failure(found, "TIMED_OUT", "STALLED")
        other = stream.new(worker.prompt(2, len(targets) * worker.block_size), blocks=targets)
        stream.step(other, first)
        released.set()
        sent.wait(1.0)
        stream.generate(other, 3)
    worker.expect_as_alone("a sequence in blocks that a fetch was to write", other)


def _unused(worker: Worker, stream: StepStream) -> list[int]:
    moving(worker)
    return stream.blocks.take(1)


@refusal_case("plan", "Unknown ids are an error.", "ended_lease_ids")
def a_plan_that_ends_an_unknown_lease_is_refused(worker: Worker, stream: StepStream) -> None:
    _unused(worker, stream)
    stream.send_changed(ended_lease_ids=[1])


@refusal_case("plan", "positive, unique on the stream until the lease is", "leases")
def a_lease_whose_number_is_in_use_is_refused(worker: Worker, stream: StepStream) -> None:
    _, blocks = prefix(worker, stream)
    send(stream, leases=[lease(blocks)])
    plan = stream.plan()
    plan.leases.append(lease(blocks))
    stream.send_plan(plan)


@refusal_case("plan", "b for device block b, ~b for host block b", "leases")
def a_lease_of_a_block_that_does_not_exist_is_refused(worker: Worker, stream: StepStream) -> None:
    moving(worker)
    plan = stream.plan()
    plan.leases.append(lease([stream.num_gpu_blocks]))
    stream.send_plan(plan)


@refusal_case(
    "plan", "Pairs (block of the source as in BlockLease, device block of this", "fetches"
)
def a_fetch_to_a_block_that_does_not_exist_is_refused(worker: Worker, stream: StepStream) -> None:
    moving(worker)
    plan = stream.plan()
    plan.fetches.append(fetch(stream, worker.address, [(0, stream.num_gpu_blocks)]))
    stream.send_plan(plan)


@refusal_case("plan", "16 bytes per pair: the keys of the source's lease.", "fetches")
def a_fetch_without_a_key_for_each_block_is_refused(worker: Worker, stream: StepStream) -> None:
    plan = stream.plan()
    (block,) = _unused(worker, stream)
    plan.fetches.append(fetch(stream, worker.address, [(block, block)], keys=bytes(15)))
    stream.send_plan(plan)


@case("plan", "Nothing reads, writes or leases the target blocks until a result has reported")
def a_plan_that_uses_the_targets_of_an_open_fetch_is_refused(worker: Worker) -> None:
    released = Event()

    def wait(parts: Parts) -> Parts:
        released.wait(worker.timeout_s)
        yield from parts

    try:
        with worker.open() as stream, relay(worker, wait) as address:
            _, blocks = prefix(worker, stream)
            targets = stream.blocks.take(len(blocks))
            send(stream, leases=[lease(blocks)])
            pairs = list(zip(blocks, targets, strict=True))
            if send(stream, fetches=[fetch(stream, address, pairs)]).message.fetches:
                raise Skipped("the worker cannot call the kit")
            stream.send(stream.new(worker.prompt(2), blocks=targets))
            refusal = stream.call.refusal()
            refusal.expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences", "block_updates")
    finally:
        released.set()
