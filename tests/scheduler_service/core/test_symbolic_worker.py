"""The symbolic worker finds each kind of wrong plan: else the tests built on it prove nothing."""

import dataclasses

import pytest

from scheduler_service.core import NewSequence, StepPlan
from scheduler_service.core.config import CacheGroup
from scheduler_service.core.step_plan import BlockTable
from tests.support.symbolic_worker import PlanError, Sampling, SymbolicWorker, undisturbed

SAMPLING = Sampling(seed=1)


GROUPS = (CacheGroup(block_tokens=4),)


def new(seq_id: int, blocks: list[int], num_tokens: int = 6, **changes: object) -> NewSequence:
    sequence = NewSequence(
        seq_id=seq_id,
        choice_index=0,
        token_ids=[3] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        tables=[BlockTable(group=0, first_index=0, block_ids=blocks)],
        sampling=SAMPLING,
    )
    return dataclasses.replace(sequence, **changes)  # type: ignore[arg-type]


def worker_with_two_choices() -> SymbolicWorker:
    """Sequences 1 and 2 share a prompt of 6 tokens in blocks 0 and 1; 8 blocks of 4 tokens."""
    worker = SymbolicWorker(
        num_gpu_blocks=8, cache_groups=GROUPS, max_num_seqs=4, max_num_batched_tokens=16
    )
    fork = new(2, [0, 1], 0, choice_index=1, parent_seq_id=1)
    plan = StepPlan(
        step_id=1, new_sequences=[new(1, [0, 1]), fork], seq_ids=[1, 2], num_tokens=[6, 0]
    )
    worker.execute(plan)
    return worker


def test_a_right_plan_gives_the_undisturbed_tokens() -> None:
    worker = worker_with_two_choices()
    plan = StepPlan(step_id=2, copy=[1, 2], block_updates=[1, 0, 1, 2], seq_ids=[1, 2])
    tokens = worker.execute(plan).token_ids
    expected = [undisturbed([3] * 6, choice, SAMPLING, frozenset(), 2)[1] for choice in (0, 1)]
    assert tokens == expected


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(step_id=3, seq_ids=[1]), "out of order"),
        (StepPlan(step_id=2, seq_ids=[1, 2]), "shared by"),
        (StepPlan(step_id=2, seq_ids=[9]), "unknown"),
        (StepPlan(step_id=2, forget_seq_ids=[9], seq_ids=[1]), "unknown"),
        (StepPlan(step_id=2, block_updates=[1, 0, 1, 2], seq_ids=[1, 2]), "something else"),
        (
            StepPlan(step_id=2, copy=[5, 2], block_updates=[1, 0, 1, 2], seq_ids=[1]),
            "nobody has written",
        ),
        (StepPlan(step_id=2, copy=[1, 2], seq_ids=[1]), "nobody gets"),
        (StepPlan(step_id=2, copy=[1, 0], seq_ids=[1]), "in use"),
        (StepPlan(step_id=2, block_updates=[1, 0, 3, 2], seq_ids=[1]), "leaves a gap"),
        (StepPlan(step_id=2, block_updates=[1, 0, 2, 9], seq_ids=[1]), "does not exist"),
        (StepPlan(step_id=2, forget_seq_ids=[2], seq_ids=[1, 1]), "two rows"),
        (StepPlan(step_id=2, forget_seq_ids=[2], seq_ids=[1], num_tokens=[2]), "does not have"),
        (StepPlan(step_id=2, forget_seq_ids=[2], seq_ids=[1], num_tokens=[0]), "nothing"),
        (StepPlan(step_id=2, new_sequences=[new(1, [4, 5])], seq_ids=[1]), "known already"),
        (
            StepPlan(step_id=2, new_sequences=[new(3, [1, 5])], seq_ids=[3], num_tokens=[6]),
            "while in use",
        ),
        (
            StepPlan(step_id=2, new_sequences=[new(3, [4])], seq_ids=[3], num_tokens=[6]),
            "3 has no block for position 4",
        ),
        (
            StepPlan(step_id=2, new_sequences=[new(3, [4, 5])], seq_ids=[3], num_tokens=[3]),
            "mid-prompt",
        ),
        (StepPlan(step_id=2, new_sequences=[new(3, [4, 5])], seq_ids=[1]), "has no row"),
        (
            StepPlan(
                step_id=2,
                new_sequences=[new(3, [4, 5], num_computed_tokens=4)],
                seq_ids=[3],
                num_tokens=[2],
            ),
            "finds something else at position 0, block 4",
        ),
        (
            StepPlan(
                step_id=2,
                new_sequences=[new(3, [0, 5], num_computed_tokens=4, token_ids=[3, 3, 3, 4, 3, 3])],
                seq_ids=[3],
                num_tokens=[2],
            ),
            "finds something else at position 3, block 0",
        ),
        (
            StepPlan(
                step_id=2,
                new_sequences=[new(3, [0, 5], num_computed_tokens=4)],
                seq_ids=[3],
                num_tokens=[2],
            ),
            "reuses step 1 before its result",
        ),
        (
            StepPlan(
                step_id=2,
                new_sequences=[new(3, [0, 1], num_computed_tokens=6)],
                seq_ids=[3],
                num_tokens=[1],
            ),
            "no logits to come",
        ),
        (
            StepPlan(
                step_id=2,
                new_sequences=[new(3, [4, 5, 6, 7], 16), new(4, [2], 1)],
                seq_ids=[3, 4],
                num_tokens=[16, 1],
            ),
            "17 tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_plan_is_found_in_its_step(plan: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        worker_with_two_choices().execute(plan)


def test_a_computed_prefix_is_used_once_its_result_is_taken() -> None:
    worker = worker_with_two_choices()
    worker.num_results_taken = 1
    known = new(3, [0, 5], num_computed_tokens=4)
    worker.execute(StepPlan(step_id=2, new_sequences=[known], seq_ids=[3], num_tokens=[2]))
    late = new(4, [5, 6], num_computed_tokens=4)
    with pytest.raises(PlanError, match="finds something else at position 0, block 5"):
        worker.execute(StepPlan(step_id=3, new_sequences=[late], seq_ids=[4], num_tokens=[2]))


def test_a_block_given_away_too_early_is_found_when_it_is_read() -> None:
    worker = worker_with_two_choices()
    worker.execute(StepPlan(step_id=2, forget_seq_ids=[2], seq_ids=[1]))
    # As if sequence 1's first block had been overwritten by another's computation.
    worker.cache[0, 2] = b"other", 2
    with pytest.raises(PlanError, match="1 reads position 2 from block 0"):
        worker.execute(StepPlan(step_id=3, block_updates=[], seq_ids=[1]))


def worker_with_host_blocks() -> SymbolicWorker:
    """Sequence 1 has 6 tokens in blocks 0 and 1, and one sampled; 8 blocks, 4 host blocks."""
    worker = SymbolicWorker(
        num_gpu_blocks=8,
        cache_groups=GROUPS,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_cpu_blocks=4,
    )
    worker.execute(StepPlan(step_id=1, new_sequences=[new(1, [0, 1])], seq_ids=[1], num_tokens=[6]))
    worker.num_results_taken = 1
    return worker


def come_back(blocks: list[int]) -> NewSequence:
    """Sequence 1 again, with the token it has sampled."""
    token = undisturbed([3] * 6, 0, SAMPLING, frozenset(), 1)[0]
    tokens = [3] * 6 + [token]
    return new(1, blocks, 7, token_ids=tokens, num_prompt_tokens=6, num_computed_tokens=6)


def test_a_sequence_that_was_swapped_out_and_in_goes_on() -> None:
    worker = worker_with_host_blocks()
    worker.execute(StepPlan(step_id=2, forget_seq_ids=[1], swap_out=[0, 2, 1, 3]))
    worker.execute(StepPlan(step_id=3, swap_in=[2, 5, 3, 0]))
    plan = StepPlan(step_id=4, new_sequences=[come_back([5, 0])], seq_ids=[1])
    expected = undisturbed([3] * 6, 0, SAMPLING, frozenset(), 2)[1:]
    assert worker.execute(plan).token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "nothing to do"),
        ({"swap_out": [5, 0]}, "which nobody has written"),
        ({"swap_in": [2, 5]}, "which nobody has written"),
        ({"swap_out": [0, 0, 1, 0]}, "into one block twice"),
        ({"swap_out": [0, 4]}, "host block 4 does not exist"),
        ({"swap_out": [8, 0]}, "block 8 does not exist"),
        ({"swap_out": [0, 0], "swap_in": [0, 1]}, "in use"),
        ({"swap_out": [1, 0], "seq_ids": [1]}, "which is swapped out"),
        (
            {"swap_out": [0, 0], "swap_in": [0, 5], "copy": [5, 6], "block_updates": [1, 0, 2, 6]},
            "on its way",
        ),
        (
            {
                "swap_out": [0, 0],
                "swap_in": [0, 5],
                "new_sequences": [new(2, [5, 6], num_computed_tokens=4)],
                "seq_ids": [2],
                "num_tokens": [2],
            },
            "reads 5 too early",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_swap_is_found_in_its_step(changes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        worker_with_host_blocks().execute(StepPlan(step_id=2, **changes))  # type: ignore[arg-type]


def test_a_live_host_block_that_was_written_again_is_found_when_its_sequence_returns() -> None:
    worker = worker_with_host_blocks()
    worker.execute(StepPlan(step_id=2, forget_seq_ids=[1], swap_out=[0, 2, 1, 3]))
    worker.execute(StepPlan(step_id=3, swap_out=[1, 2]))
    worker.execute(StepPlan(step_id=4, swap_in=[2, 5, 3, 0]))
    plan = StepPlan(step_id=5, new_sequences=[come_back([5, 0])], seq_ids=[1])
    with pytest.raises(PlanError, match="finds something else at position 0, block 5"):
        worker.execute(plan)


def test_a_fork_may_not_come_before_its_parent() -> None:
    worker = SymbolicWorker(
        num_gpu_blocks=8, cache_groups=GROUPS, max_num_seqs=4, max_num_batched_tokens=16
    )
    fork = new(2, [0, 1], 0, choice_index=1, parent_seq_id=1)
    plan = StepPlan(
        step_id=1, new_sequences=[new(1, [0, 1]), fork], seq_ids=[2, 1], num_tokens=[0, 6]
    )
    with pytest.raises(PlanError, match="before its parent"):
        worker.execute(plan)
