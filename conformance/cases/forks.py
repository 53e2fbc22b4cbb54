"""Sequences that take over another's tokens and KV."""

import grpc

from conformance import columns
from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.generation import Generation, expect_same
from conformance.sequence import sampler_params
from conformance.worker import Worker

SEED = 5
NUM_FORKS = 3


@case("plan", "samples from the parent's last logits")
def forks_without_tokens_sample_from_their_parents_logits(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        parent = stream.new(prompt)
        forks = [stream.fork(parent) for _ in range(NUM_FORKS)]
        result = stream.step(parent.row(), *(fork.row(0) for fork in forks))
    for fork in forks:
        found = Generation([result.sampled[fork.seq_id]])
        worker.expect_as_alone("a fork's first token", found, prompt)


@case("plan", "A fork whose row in this plan computes 0 tokens also takes over what its parent")
def forks_draw_for_themselves(worker: Worker) -> None:
    prompt, num_tokens = worker.prompt(2), 3
    sampling = sampler_params(seed=SEED)
    with worker.open() as stream:
        parent = stream.new(prompt, sampling=sampling)
        forks = [stream.fork(parent, sampling=sampling, choice_index=1 + i) for i in range(3)]
        family = [parent, *forks]
        results = [stream.step(parent.row(), *(fork.row(0) for fork in forks))]
        # Each continues in a last block of its own: copy-on-write.
        copies = []
        for fork in forks:
            target = stream.take_blocks(1)[0]
            copies.append((fork.blocks[-1], target))
            fork.blocks[-1] = target
        updates = [(fork.seq_id, len(fork.blocks) - 1, fork.blocks[-1]) for fork in forks]
        results.append(
            stream.step(*(each.row() for each in family), copy=copies, block_updates=updates)
        )
        while len(results) < num_tokens:
            results.append(stream.step(*(each.row() for each in family)))
    for each in family:
        found = Generation([result.sampled[each.seq_id] for result in results])
        what = f"choice {each.choice_index} of a family of forks"
        worker.expect_as_alone(what, found, prompt, sampling, choice_index=each.choice_index)


@case("plan", "the sequence whose tokens and computed tokens it takes over")
def a_fork_with_its_own_rows_continues_where_its_parent_stands(worker: Worker) -> None:
    prompt = worker.prompt(3)
    sampling = sampler_params(seed=SEED)
    with worker.open() as stream:
        parent = stream.new(prompt, sampling=sampling)
        stream.generate(parent, 2)
        source, target = parent.blocks[-1], stream.take_blocks(1)[0]
        blocks = [*parent.blocks[:-1], target]
        fork = stream.fork(parent, blocks=blocks, sampling=sampling)
        first = stream.step(parent.row(), fork.row(), copy=[(source, target)])
        second = stream.step(fork.row())
        found = Generation([result.sampled[fork.seq_id] for result in (first, second)])
    worker.expect_as_alone("a fork that computes its own row", found, prompt, sampling, start=2)


@case("plan", "In a fork: tokens that follow the parent's")
def a_forks_own_tokens_follow_its_parents(worker: Worker) -> None:
    prompt, extra = worker.prompt(4), worker.prompt(5, 3)
    sampling = sampler_params(seed=SEED)
    with worker.open() as stream:
        parent = stream.new(prompt, sampling=sampling)
        stream.generate(parent, 2)
        target = stream.take_blocks(1)[0]
        blocks = [*parent.blocks[:-1], target]
        fork = stream.fork(parent, extra, blocks=blocks, sampling=sampling)
        found = stream.generate(fork, 2, copy=[(parent.blocks[-1], target)])
        tokens = list(fork.tokens[: len(prompt) + 2 + len(extra)])
    expect("tokens of the fork", tokens[-3:], extra)
    with worker.open() as stream:
        told = stream.new(tokens, num_prompt_tokens=len(prompt), sampling=sampling)
        expected = stream.generate(told, 2)
    exact = worker.info.model.batch_invariant
    expect_same("a fork with tokens of its own", found, expected, exact=exact)


@case("plan", "as they are before this step's forward pass")
def a_parent_is_not_disturbed_by_its_forks(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        parent = stream.new(prompt)
        fork = stream.fork(parent)
        steps = [stream.step(parent.row(), fork.row(0)).sampled[parent.seq_id]]
        steps += stream.generate(parent, 2, forget=[fork]).steps
    worker.expect_as_alone("the parent of a forgotten fork", Generation(steps), prompt)


@case("plan", "the sequence whose tokens and computed tokens it takes over")
def a_fork_outlives_its_parent(worker: Worker) -> None:
    prompt = worker.prompt(2)
    with worker.open() as stream:
        parent = stream.new(prompt)
        fork = stream.fork(parent)
        steps = [stream.step(parent.row(), fork.row(0)).sampled[fork.seq_id]]
        steps += stream.generate(fork, 3, forget=[parent]).steps
    worker.expect_as_alone("the fork of a forgotten parent", Generation(steps), prompt)


@case("plan", "a fork comes after its parent")
def a_parent_may_be_as_new_as_its_fork(worker: Worker) -> None:
    with worker.open() as stream:
        parent = stream.new(worker.prompt(3))
        fork = stream.fork(parent)
        result = stream.step(parent.row(), fork.row(0))
        expect("tokens of parent and fork", len(result.sampled), 2)
        expect_true(result.token(parent) == result.token(fork), "parent and fork differ")


@case("plan", "A fork whose row in this plan computes 0 tokens")
def a_row_without_tokens_that_is_no_fork_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.step(sequence.row())
        plan = stream.plan()
        plan.seq_ids = columns.pack([sequence.seq_id])
        plan.num_tokens = columns.pack([0])
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "num_tokens")
