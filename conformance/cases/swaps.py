"""Blocks that are swapped out and in. Skipped if the worker has no host blocks."""

from conformance.assertions import Skipped, expect
from conformance.case import Alone, case, stream_case
from conformance.cases.cache_operations import NUM_PROMPTS, overwrite
from conformance.step_stream import StepStream
from conformance.worker import Worker


def require_host_blocks(stream: StepStream, count: int) -> None:
    """Skip the case where the worker's host cache is smaller."""
    if stream.num_cpu_blocks < count:
        raise Skipped(f"the worker has {stream.num_cpu_blocks} host blocks, {count} are needed")


@case("plan", "copy device to host")
def blocks_come_back_from_the_host_as_they_were(worker: Worker) -> None:
    for number in range(NUM_PROMPTS):
        with worker.open() as stream:
            first = stream.generate(stream.new(worker.prompt(number)), 3)
            count = len(first.blocks)
            require_host_blocks(stream, count)
            host = [stream.num_cpu_blocks - 1 - index for index in range(count)]
            companion = stream.new(worker.prompt(40))
            swap_out = zip(first.blocks, host, strict=True)
            stream.step(companion, forget=[first], swap_out=swap_out)
            overwrite(stream, worker, first.blocks, companion)
            back = stream.blocks.take(count)
            stream.step(companion, swap_in=zip(host, back, strict=True))
            again = stream.resumed(
                first, num_computed_tokens=first.num_computed_tokens, blocks=back
            )
            stream.generate(again, 3)
        worker.expect_as_alone("a sequence swapped out and in", again)


@stream_case("plan", "A block freed by a swap-out may therefore be a target of the same step.")
def a_block_swapped_out_may_be_written_in_the_same_step(
    worker: Worker, stream: StepStream
) -> Alone:
    first, second = stream.new(worker.prompt(1)), stream.new(worker.prompt(2))
    stream.step(first, second)
    count = min(len(first.blocks), len(second.blocks))
    require_host_blocks(stream, 2 * count)
    parked, other_host = range(count), range(count, 2 * count)
    companion = stream.new(worker.prompt(3))
    out = zip(second.blocks[:count], parked, strict=True)
    stream.step(companion, forget=[second], swap_out=out)
    # Now the first one is swapped out, and the second one into its place.
    out = zip(first.blocks[:count], other_host, strict=True)
    back_in = zip(parked, first.blocks[:count], strict=True)
    stream.step(companion, forget=[first], swap_out=out, swap_in=back_in)
    found = stream.generate(stream.borrowed(worker.prompt(2), first.blocks[:count]), 3)
    back = stream.blocks.take(count)
    stream.step(companion, swap_in=zip(other_host, back, strict=True))
    other = stream.generate(stream.borrowed(worker.prompt(1), back), 3)
    return {"the sequence swapped in": found, "the sequence swapped out": other}


@stream_case("plan", "forget sequences, swap out, swap in, copy, begin leases")
def a_block_may_be_swapped_out_before_a_copy_overwrites_it(
    worker: Worker, stream: StepStream
) -> Alone:
    first, second = stream.new(worker.prompt(1)), stream.new(worker.prompt(2))
    companion = stream.new(worker.prompt(3))
    stream.step(first, second, companion)
    count = stream.num_full_blocks(worker.prompt(1))
    require_host_blocks(stream, count)
    ours, theirs = first.blocks[:count], second.blocks[:count]
    stream.step(companion, forget=[first, second])
    out, copy = zip(ours, range(count), strict=True), zip(theirs, ours, strict=True)
    stream.step(companion, swap_out=out, copy=copy)
    copied = stream.generate(stream.borrowed(worker.prompt(2), ours), 3)
    back = stream.blocks.take(count)
    stream.step(companion, swap_in=zip(range(count), back, strict=True))
    found = stream.generate(stream.borrowed(worker.prompt(1), back), 3)
    return {"the sequence swapped out first": found, "the sequence copied over it": copied}


@stream_case("plan", "A step with cache operations may have no rows.")
def a_step_without_rows_moves_blocks(worker: Worker, stream: StepStream) -> Alone:
    first = stream.generate(stream.new(worker.prompt(1)), 2)
    count = len(first.blocks)
    require_host_blocks(stream, count)
    out = stream.step(forget=[first], swap_out=zip(first.blocks, range(count), strict=True))
    back = stream.blocks.take(count)
    stream.step(swap_in=zip(range(count), back, strict=True))
    again = stream.resumed(first, num_computed_tokens=first.num_computed_tokens, blocks=back)
    stream.generate(again, 2)
    expect("tokens of a step without rows", out.message.token_ids, b"")
    return {"a sequence moved in steps without rows": again}


@stream_case("plan", "copy host to device, after swap_out has written")
def a_swap_in_reads_what_its_own_step_swapped_out(worker: Worker, stream: StepStream) -> Alone:
    prompt = worker.prompt(2)
    first, companion = stream.new(prompt), stream.new(worker.prompt(3))
    stream.step(first, companion)
    count = stream.num_full_blocks(prompt)
    require_host_blocks(stream, count)
    back = stream.blocks.take(count)
    out = zip(first.blocks[:count], range(count), strict=True)
    stream.step(companion, swap_out=out, swap_in=zip(range(count), back, strict=True))
    stream.step(companion, forget=[first])
    overwrite(stream, worker, first.blocks, companion)
    found = stream.generate(stream.borrowed(prompt, back), 3)
    return {"a sequence swapped out and in by one step": found}


@stream_case("plan", "The source of a swap-out may be read by a row of this step")
def a_block_may_be_read_while_it_is_swapped_out(worker: Worker, stream: StepStream) -> Alone:
    prompt = worker.prompt(1)
    count = stream.num_full_blocks(prompt)
    first = stream.prefilled(prompt)
    require_host_blocks(stream, count)
    stream.generate(first, 3, swap_out=zip(first.blocks[:count], range(count), strict=True))
    back = stream.blocks.take(count)
    stream.step(forget=[first], swap_in=zip(range(count), back, strict=True))
    found = stream.generate(stream.borrowed(prompt, back), 3)
    return {
        "a sequence during its swap-out": first,
        "a sequence with the blocks swapped out then": found,
    }


@stream_case("plan", "Blocks that are swapped in may be used from the next step on")
def the_next_step_finds_what_was_swapped_in(worker: Worker, stream: StepStream) -> Alone:
    """The plans are sent without waiting, so that a worker may overlap them."""
    prompt = worker.prompt(1)
    count = stream.num_full_blocks(prompt)
    first, companion = stream.new(prompt), stream.new(worker.prompt(2))
    stream.step(first, companion)
    require_host_blocks(stream, count)
    back = stream.blocks.take(count)
    out = zip(first.blocks[:count], range(count), strict=True)
    stream.send(companion, forget=[first], swap_out=out)
    stream.send(companion, swap_in=zip(range(count), back, strict=True))
    again = stream.borrowed(prompt, back)
    stream.send(companion, again)
    stream.receive_all()
    return {"a sequence right after its swap-in": again, "a row of steps with swaps": companion}


@stream_case(
    "plan", "A host block that this frees may be a target of swap_out from the next plan on."
)
def a_host_block_is_reusable_in_the_next_step(worker: Worker, stream: StepStream) -> Alone:
    count = stream.num_full_blocks(worker.prompt(1))
    first, second = stream.new(worker.prompt(1)), stream.new(worker.prompt(2))
    stream.step(first, second)
    require_host_blocks(stream, count)
    host, found = range(count), {}
    targets = [stream.blocks.take(count) for _ in range(2)]
    for sequence, blocks in zip((first, second), targets, strict=True):
        stream.send(forget=[sequence], swap_out=zip(sequence.blocks[:count], host, strict=True))
        stream.send(swap_in=zip(host, blocks, strict=True))
    stream.receive_all()
    for number, blocks in enumerate(targets, start=1):
        again = stream.generate(stream.borrowed(worker.prompt(number), blocks), 3)
        found[f"sequence {number} in these host blocks"] = again
    return found
