"""Sequences that take over another's tokens and KV."""

from conformance.assertions import expect, expect_true
from conformance.case import Alone, case, refusal_case, stream_case
from conformance.generation import Generation, expect_same
from conformance.sequence import sampler_params
from conformance.step_stream import StepStream
from conformance.worker import Worker

SAMPLING = sampler_params(seed=5)
NUM_FORKS = 3


@stream_case("plan", "samples from the parent's last logits")
def forks_without_tokens_sample_from_their_parents_logits(
    worker: Worker, stream: StepStream
) -> Alone:
    parent = stream.new(worker.prompt(1))
    forks = [stream.fork(parent) for _ in range(NUM_FORKS)]
    stream.step(parent, *(fork.row(0) for fork in forks))
    return {f"the first token of fork {number}": fork for number, fork in enumerate(forks)}


@stream_case(
    "plan", "A fork whose row in this plan computes 0 tokens also takes over what its parent"
)
def forks_draw_for_themselves(worker: Worker, stream: StepStream) -> Alone:
    parent = stream.new(worker.prompt(2), sampling=SAMPLING)
    forks = [
        stream.fork(parent, sampling=SAMPLING, choice_index=1 + index) for index in range(NUM_FORKS)
    ]
    stream.step(parent, *(fork.row(0) for fork in forks))
    # Each continues in a last block of its own: copy-on-write.
    copies, updates = [], []
    for fork in forks:
        own_copies, own_updates = stream.blocks.part(fork)
        copies += own_copies
        updates += own_updates
    stream.step(parent, *forks, copy=copies, block_updates=updates)
    stream.step(parent, *forks)
    return {
        f"choice {sequence.choice_index} of a family of forks": sequence
        for sequence in (parent, *forks)
    }


@stream_case("plan", "the sequence whose tokens and computed tokens it takes over")
def a_fork_with_its_own_rows_continues_where_its_parent_stands(
    worker: Worker, stream: StepStream
) -> Alone:
    parent = stream.generate(stream.new(worker.prompt(3), sampling=SAMPLING), 2)
    fork, copy = stream.fork_with_last_block(parent, sampling=SAMPLING)
    stream.step(parent, fork, copy=copy)
    stream.step(fork)
    return {"a fork that computes its own row": fork}


@case("plan", "In a fork: tokens that follow the parent's")
def a_forks_own_tokens_follow_its_parents(worker: Worker) -> None:
    prompt, extra = worker.prompt(4), worker.prompt(5, 3)
    with worker.open() as stream:
        parent = stream.generate(stream.new(prompt, sampling=SAMPLING), 2)
        fork, copy = stream.fork_with_last_block(parent, extra, sampling=SAMPLING)
        stream.generate(fork, 2, copy=copy)
        tokens = fork.tokens[: len(prompt) + 2 + len(extra)]
    expect("tokens of the fork", tokens[-3:], extra)
    with worker.open() as stream:
        plain = stream.new(tokens, num_prompt_tokens=len(prompt), sampling=SAMPLING)
        stream.generate(plain, 2)
    found, expected = Generation(fork.sampled), Generation(plain.sampled)
    exact = worker.info.model.batch_invariant
    expect_same("a fork with tokens of its own", found, expected, exact=exact)


@stream_case("plan", "as they are before this step's forward pass")
def a_parent_is_not_disturbed_by_its_forks(worker: Worker, stream: StepStream) -> Alone:
    parent = stream.new(worker.prompt(1))
    fork = stream.fork(parent)
    stream.step(parent, fork.row(0))
    stream.generate(parent, 2, forget=[fork])
    return {"the parent of a forgotten fork": parent}


@stream_case("plan", "the sequence whose tokens and computed tokens it takes over")
def a_fork_outlives_its_parent(worker: Worker, stream: StepStream) -> Alone:
    parent = stream.new(worker.prompt(2))
    fork = stream.fork(parent)
    stream.step(parent, fork.row(0))
    stream.generate(fork, 3, forget=[parent])
    return {"the fork of a forgotten parent": fork}


@stream_case("plan", "a fork comes after its parent")
def a_parent_may_be_as_new_as_its_fork(worker: Worker, stream: StepStream) -> None:
    parent = stream.new(worker.prompt(3))
    fork = stream.fork(parent)
    result = stream.step(parent, fork.row(0))
    expect("tokens of parent and fork", len(result.sampled), 2)
    expect_true(result.token(parent) == result.token(fork), "parent and fork differ")


@refusal_case("plan", "A fork whose row in this plan computes 0 tokens", "num_tokens")
def a_row_without_tokens_that_is_no_fork_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    stream.send_changed(seq_ids=[known.seq_id], num_tokens=[0])
