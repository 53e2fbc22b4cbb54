"""Blocks that are swapped out and in. Skipped if the worker has no host blocks."""

from conformance.assertions import Skipped, expect
from conformance.case import case
from conformance.cases.cache_operations import NUM_PROMPTS, borrowed, full_blocks, overwrite
from conformance.generation import Generation
from conformance.step_stream import StepStream
from conformance.worker import Worker


def require_host_blocks(stream: StepStream, count: int) -> None:
    """Skip the case where the worker's host cache is smaller."""
    if stream.num_cpu_blocks < count:
        raise Skipped(f"the worker has {stream.num_cpu_blocks} host blocks, {count} are needed")


@case("plan", "copy device to host")
def blocks_come_back_from_the_host_as_they_were(worker: Worker) -> None:
    for number in range(NUM_PROMPTS):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            first = stream.new(prompt)
            stream.generate(first, 3)
            count = len(first.blocks)
            require_host_blocks(stream, count)
            host = [stream.num_cpu_blocks - 1 - index for index in range(count)]
            companion = stream.new(worker.prompt(40))
            swap_out = list(zip(first.blocks, host, strict=True))
            stream.step(companion.row(), forget=[first], swap_out=swap_out)
            overwrite(stream, worker, first.blocks, companion)
            back = stream.take_blocks(count)
            stream.step(companion.row(), swap_in=list(zip(host, back, strict=True)))
            again = stream.new(
                first.tokens,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=first.num_computed_tokens,
                blocks=back,
            )
            found = stream.generate(again, 3)
        worker.expect_as_alone("a sequence swapped out and in", found, prompt, start=3)


@case("plan", "A block freed by a swap-out may therefore be a target of the same step.")
def a_block_swapped_out_may_be_written_in_the_same_step(worker: Worker) -> None:
    first_prompt, second_prompt = worker.prompt(1), worker.prompt(2)
    with worker.open() as stream:
        first, second = stream.new(first_prompt), stream.new(second_prompt)
        stream.step(first.row(), second.row())
        count = min(len(first.blocks), len(second.blocks))
        require_host_blocks(stream, 2 * count)
        parked = list(range(count))
        companion = stream.new(worker.prompt(3))
        out = list(zip(second.blocks[:count], parked, strict=True))
        stream.step(companion.row(), forget=[second], swap_out=out)
        # Now the first one is swapped out, and the second one into its place.
        stream.step(
            companion.row(),
            forget=[first],
            swap_out=list(zip(first.blocks[:count], range(count, 2 * count), strict=True)),
            swap_in=list(zip(parked, first.blocks[:count], strict=True)),
        )
        shared = full_blocks(worker, second_prompt)
        again = borrowed(stream, worker, second_prompt, first.blocks[:shared])
        found = stream.generate(again, 3)
        back = stream.take_blocks(count)
        moves = list(zip(range(count, 2 * count), back, strict=True))
        stream.step(companion.row(), swap_in=moves)
        shared = full_blocks(worker, first_prompt)
        other = stream.generate(borrowed(stream, worker, first_prompt, back[:shared]), 3)
    worker.expect_as_alone("the sequence swapped in", found, second_prompt)
    worker.expect_as_alone("the sequence swapped out", other, first_prompt)


@case("plan", "Order: forget sequences, swap out, swap in, copy, take in new sequences")
def a_block_may_be_swapped_out_before_a_copy_overwrites_it(worker: Worker) -> None:
    first_prompt, second_prompt = worker.prompt(1), worker.prompt(2)
    with worker.open() as stream:
        first, second = stream.new(first_prompt), stream.new(second_prompt)
        companion = stream.new(worker.prompt(3))
        stream.step(first.row(), second.row(), companion.row())
        count = full_blocks(worker, first_prompt)
        require_host_blocks(stream, count)
        ours, theirs = first.blocks[:count], second.blocks[:count]
        stream.step(companion.row(), forget=[first, second])
        stream.step(
            companion.row(),
            swap_out=list(zip(ours, range(count), strict=True)),
            copy=list(zip(theirs, ours, strict=True)),
        )
        copied = stream.generate(borrowed(stream, worker, second_prompt, ours), 3)
        back = stream.take_blocks(count)
        stream.step(companion.row(), swap_in=list(zip(range(count), back, strict=True)))
        found = stream.generate(borrowed(stream, worker, first_prompt, back), 3)
    worker.expect_as_alone("the sequence swapped out first", found, first_prompt)
    worker.expect_as_alone("the sequence copied over it", copied, second_prompt)


@case("plan", "A step with cache operations may have no rows.")
def a_step_without_rows_moves_blocks(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        first = stream.new(prompt)
        stream.generate(first, 2)
        count = len(first.blocks)
        require_host_blocks(stream, count)
        out = stream.step(
            forget=[first], swap_out=list(zip(first.blocks, range(count), strict=True))
        )
        back = stream.take_blocks(count)
        stream.step(swap_in=list(zip(range(count), back, strict=True)))
        again = stream.new(
            first.tokens,
            num_prompt_tokens=len(prompt),
            num_computed_tokens=first.num_computed_tokens,
            blocks=back,
        )
        found = stream.generate(again, 2)
    expect("tokens of a step without rows", out.message.token_ids, b"")
    worker.expect_as_alone("a sequence moved in steps without rows", found, prompt, start=2)


@case("plan", "copy host to device, after swap_out has written")
def a_swap_in_reads_what_its_own_step_swapped_out(worker: Worker) -> None:
    prompt = worker.prompt(2)
    with worker.open() as stream:
        first = stream.new(prompt)
        companion = stream.new(worker.prompt(3))
        stream.step(first.row(), companion.row())
        count = full_blocks(worker, prompt)
        require_host_blocks(stream, count)
        back = stream.take_blocks(count)
        stream.step(
            companion.row(),
            swap_out=list(zip(first.blocks[:count], range(count), strict=True)),
            swap_in=list(zip(range(count), back, strict=True)),
        )
        stream.step(companion.row(), forget=[first])
        overwrite(stream, worker, first.blocks, companion)
        found = stream.generate(borrowed(stream, worker, prompt, back), 3)
    worker.expect_as_alone("a sequence swapped out and in by one step", found, prompt)


@case("plan", "The source of a swap-out may be read by a row of this step")
def a_block_may_be_read_while_it_is_swapped_out(worker: Worker) -> None:
    prompt = worker.prompt(1)
    count = full_blocks(worker, prompt)
    with worker.open() as stream:
        first = stream.new(prompt)
        steps = [stream.step(first.row()).sampled[first.seq_id]]
        require_host_blocks(stream, count)
        out = list(zip(first.blocks[:count], range(count), strict=True))
        steps += stream.generate(first, 3, swap_out=out).steps
        back = stream.take_blocks(count)
        stream.step(forget=[first], swap_in=list(zip(range(count), back, strict=True)))
        found = stream.generate(borrowed(stream, worker, prompt, back), 3)
    worker.expect_as_alone("a sequence during its swap-out", Generation(steps), prompt)
    worker.expect_as_alone("a sequence with the blocks swapped out then", found, prompt)


@case("plan", "Blocks that are swapped in may be used from the next step on")
def the_next_step_finds_what_was_swapped_in(worker: Worker) -> None:
    """The plans are sent without waiting, so that a worker may overlap them."""
    prompt, other = worker.prompt(1), worker.prompt(2)
    count = full_blocks(worker, prompt)
    with worker.open() as stream:
        first, companion = stream.new(prompt), stream.new(other)
        steps = [stream.step(first.row(), companion.row()).sampled[companion.seq_id]]
        require_host_blocks(stream, count)
        out = list(zip(first.blocks[:count], range(count), strict=True))
        back = stream.take_blocks(count)
        stream.send(companion.row(), forget=[first], swap_out=out)
        stream.send(companion.row(), swap_in=list(zip(range(count), back, strict=True)))
        again = borrowed(stream, worker, prompt, back)
        stream.send(companion.row(), again.row())
        results = [stream.receive() for _ in range(3)]
        steps += [result.sampled[companion.seq_id] for result in results]
        found = Generation([results[-1].sampled[again.seq_id]])
    worker.expect_as_alone("a sequence right after its swap-in", found, prompt)
    worker.expect_as_alone("a row beside swaps", Generation(steps), other)


@case("plan", "A host block that this frees may be a target of swap_out from the next plan on.")
def a_host_block_is_reusable_in_the_next_step(worker: Worker) -> None:
    first_prompt, second_prompt = worker.prompt(1), worker.prompt(2)
    count = full_blocks(worker, first_prompt)
    with worker.open() as stream:
        first, second = stream.new(first_prompt), stream.new(second_prompt)
        stream.step(first.row(), second.row())
        require_host_blocks(stream, count)
        host = range(count)
        ours, theirs = stream.take_blocks(count), stream.take_blocks(count)
        stream.send(forget=[first], swap_out=list(zip(first.blocks[:count], host, strict=True)))
        stream.send(swap_in=list(zip(host, ours, strict=True)))
        stream.send(forget=[second], swap_out=list(zip(second.blocks[:count], host, strict=True)))
        stream.send(swap_in=list(zip(host, theirs, strict=True)))
        for _ in range(4):
            stream.receive()
        found = stream.generate(borrowed(stream, worker, first_prompt, ours), 3)
        other = stream.generate(borrowed(stream, worker, second_prompt, theirs), 3)
    worker.expect_as_alone("the first sequence in these host blocks", found, first_prompt)
    worker.expect_as_alone("the second sequence in these host blocks", other, second_prompt)
