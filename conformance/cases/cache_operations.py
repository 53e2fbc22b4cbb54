"""Shared and copied blocks. Only correct contents lead to the right tokens."""

import grpc

from conformance import columns
from conformance.assertions import expect_true, fail
from conformance.case import case
from conformance.cases.sequences import refuses
from conformance.generation import Generation, first_difference
from conformance.sequence import Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire.v1 import plan_pb2

NUM_PROMPTS = 3


def full_blocks(worker: Worker, prompt: list[int]) -> int:
    """Number of full blocks before a prompt's last token: those that others may reuse."""
    return (len(prompt) - 1) // worker.block_size


def borrowed(stream: StepStream, worker: Worker, tokens: list[int], blocks: list[int]) -> Sequence:
    """A new sequence whose first tokens are already computed in these full blocks."""
    return stream.new(
        tokens, blocks=list(blocks), num_computed_tokens=len(blocks) * worker.block_size
    )


@case("plan", "Number of tokens whose KV is already in the blocks below (a cached prefix")
def another_sequences_blocks_serve_as_a_prefix(worker: Worker) -> None:
    for number in range(NUM_PROMPTS):
        prompt = worker.prompt(number)
        count = full_blocks(worker, prompt)
        with worker.open() as stream:
            first = stream.new(prompt)
            stream.generate(first, 2)
            shared = first.blocks[:count]
            found = stream.generate(borrowed(stream, worker, prompt, shared), 3)
        worker.expect_as_alone("a sequence with a cached prefix", found, prompt)


@case("plan", "Number of tokens whose KV is already in the blocks below (a cached prefix")
def a_prefix_serves_after_its_sequence_is_forgotten(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        first = stream.new(prompt)
        stream.generate(first, 2)
        second = borrowed(stream, worker, prompt, first.blocks[: full_blocks(worker, prompt)])
        found = stream.generate(second, 3, forget=[first])
    worker.expect_as_alone("a sequence with a cached prefix", found, prompt)


@case("plan", "Number of tokens whose KV is already in the blocks below (a cached prefix")
def the_blocks_contents_matter(worker: Worker) -> None:
    """The negative control: a worker that recomputes everything would pass all other cases."""
    differences = 0
    for number in range(NUM_PROMPTS):
        prompt, other = worker.prompt(number), worker.prompt(number + 50)
        with worker.open() as stream:
            wrong = stream.new(other)
            stream.generate(wrong, 1)
            blocks = wrong.blocks[: full_blocks(worker, prompt)]
            sequence = borrowed(stream, worker, prompt, blocks)
            try:
                found = stream.generate(sequence, 3)
            except grpc.RpcError as error:
                # A worker that checks plans, as the simulated one does, may detect this.
                expect_true(
                    error.code() is grpc.StatusCode.INVALID_ARGUMENT,
                    f"expected other tokens or INVALID_ARGUMENT, got {error.code().name}",
                )
                differences += 1
                continue
        expected = worker.alone(prompt, 3)
        differences += first_difference(found, expected, exact=False) is not None
    if differences == 0:
        fail(
            f"none of {NUM_PROMPTS} sequences changed when given the blocks of another prompt:"
            " the cache is not read, so that the other cases prove nothing about it"
        )


def overwrite(stream: StepStream, worker: Worker, blocks: list[int], companion: Sequence) -> None:
    """Fill device blocks with another sequence's KV."""
    tokens = worker.prompt(77, len(blocks) * worker.block_size)
    intruder = stream.new(tokens, blocks=list(blocks))
    stream.step(companion.row(), intruder.row())
    stream.step(companion.row(), forget=[intruder])


@case("plan", "Pairs (source, target) of device blocks, int32 column: copy-on-write.")
def a_copied_block_holds_what_its_source_held(worker: Worker) -> None:
    for number in range(NUM_PROMPTS):
        prompt = worker.prompt(number)
        count = full_blocks(worker, prompt)
        with worker.open() as stream:
            first = stream.new(prompt)
            stream.step(first.row())
            targets = stream.take_blocks(count)
            pairs = list(zip(first.blocks[:count], targets, strict=True))
            stream.step(first.row(), copy=pairs)
            _forget_and_overwrite(stream, worker, first)
            found = stream.generate(borrowed(stream, worker, prompt, targets), 3)
        worker.expect_as_alone("a sequence in copies of its blocks", found, prompt)


def _forget_and_overwrite(stream: StepStream, worker: Worker, first: Sequence) -> None:
    companion = stream.new(worker.prompt(41))
    stream.step(companion.row(), forget=[first])
    overwrite(stream, worker, first.blocks, companion)


@case("plan", "Pairs (source, target) of device blocks, int32 column: copy-on-write.")
def a_copy_leaves_its_source_as_it_is(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        first = stream.new(prompt)
        steps = [stream.step(first.row()).sampled[first.seq_id]]
        target = stream.take_blocks(1)[0]
        steps += stream.generate(first, 3, copy=[(first.blocks[0], target)]).steps
    worker.expect_as_alone("a sequence whose block was copied", Generation(steps), prompt)


@case("plan", "Each of the three cache operations reads all its sources before it writes")
def a_copys_target_may_be_another_copys_source(worker: Worker) -> None:
    first_prompt, second_prompt = worker.prompt(1), worker.prompt(2)
    with worker.open() as stream:
        first, second = stream.new(first_prompt), stream.new(second_prompt)
        companion = stream.new(worker.prompt(3))
        stream.step(first.row(), second.row(), companion.row())
        count = full_blocks(worker, first_prompt)
        ours, theirs = first.blocks[:count], second.blocks[:count]
        stream.step(companion.row(), forget=[first, second])
        exchange = [*zip(ours, theirs, strict=True), *zip(theirs, ours, strict=True)]
        stream.step(companion.row(), copy=exchange)
        found = stream.generate(borrowed(stream, worker, first_prompt, theirs), 3)
        other = stream.generate(borrowed(stream, worker, second_prompt, ours), 3)
    worker.expect_as_alone("the first of two that changed places", found, first_prompt)
    worker.expect_as_alone("the second of two that changed places", other, second_prompt)


def _beyond(field: str, pair: tuple[int, int]) -> None:
    """A case: a pair that names a block which a cache does not have."""

    def run(worker: Worker) -> None:
        def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
            plan.seq_ids = columns.pack([sequence.seq_id])
            setattr(plan, field, columns.pack(pair))

        refuses(worker, change, field)

    side = "source" if pair[0] > pair[1] else "target"
    run.__name__ = f"a_{field}_{side}_beyond_the_cache_is_refused"
    run.__module__ = __name__
    case("worker_service", "A plan that is malformed, or contradicts what the worker knows")(run)


for _field in ("swap_out", "swap_in", "copy"):
    _beyond(_field, (2**31 - 1, 0))
    _beyond(_field, (0, 2**31 - 1))
