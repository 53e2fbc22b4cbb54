"""Sequences whose tokens the core chooses: forks and appended tokens, in both kinds of worker."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from pagewire.v1 import plan_pb2
from tests.support import simulated
from tests.support.runners import RUNNERS
from tests.support.worker_driver import Row, block_table, column, sampler_params
from tests.worker_service.runner import test_model_runner as real
from worker_service.errors import InvalidPlan
from worker_service.plan import StepResult

PROMPT = [3, 1, 4, 1, 5, 9]
CHOOSING = sampler_params(num_candidates=4, repetition_penalty=1.5)

MAX_MODEL_LEN = 48

BENCHES: dict[str, Callable[[], Any]] = {
    **{
        name: partial(real.Bench, max_model_len=MAX_MODEL_LEN, make_runner=make_runner)
        for name, make_runner in RUNNERS.items()
    },
    "simulated": lambda: simulated.Bench(max_model_len=MAX_MODEL_LEN),
}


@pytest.fixture(params=list(BENCHES))
def make_bench(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return BENCHES[request.param]


def execute(
    bench: Any, step_id: int, rows: Sequence[Row], *, kind: int = 2, **fields: Any
) -> StepResult:
    """A plan of exactly these columns; kind: what rows bring that sample."""
    plan = plan_pb2.StepPlan(
        epoch=1,
        step_id=step_id,
        seq_ids=column(row.seq_id for row in rows),
        num_tokens=column(row.num_tokens for row in rows),
        output=bytes(kind * row.sample for row in rows),
        **fields,
    )
    return bench.execute(plan)


def started(bench: Any, tokens: Sequence[int] = PROMPT) -> StepResult:
    """Sequence 1 has computed its tokens, in blocks 0, 1 and 2."""
    new = plan_pb2.NewSequence(
        seq_id=1,
        token_ids=column(tokens),
        num_prompt_tokens=len(PROMPT),
        tables=block_table([0, 1, 2]),
        sampling=CHOOSING,
    )
    return execute(bench, 1, [Row(1, len(tokens))], new_sequences=[new])


def candidates(result: StepResult, row: int) -> tuple[list[int], list[float]]:
    found = result.candidates[row]
    return found.token_ids.tolist(), found.logprobs.tolist()


def fork(seq_id: int, tokens: Sequence[int], blocks: Sequence[int]) -> plan_pb2.NewSequence:
    return plan_pb2.NewSequence(
        seq_id=seq_id,
        parent_seq_id=1,
        token_ids=column(tokens),
        tables=block_table(blocks),
        sampling=CHOOSING,
    )


def test_forks_and_what_goes_on_in_place_are_as_if_computed_alone(
    make_bench: Callable[[], Any],
) -> None:
    bench = make_bench()
    first, second, third = candidates(started(bench), 0)[0][:3]
    result = execute(
        bench,
        2,
        [Row(1), Row(2), Row(3)],
        copy=column([1, 8, 1, 9]),
        new_sequences=[fork(2, [second], [0, 8]), fork(3, [third], [0, 9])],
        appended_tokens=column([1, first]),
    )
    assert result.token_ids.tolist() == [-1, -1, -1]
    for row, token in enumerate((first, second, third)):
        alone = started(make_bench(), [*PROMPT, token])
        assert candidates(result, row) == candidates(alone, 0)
    again = candidates(result, 1)[0][0]
    result = execute(
        bench, 3, [Row(2)], forget_seq_ids=column([1, 3]), appended_tokens=column([2, again])
    )
    alone = started(make_bench(), [*PROMPT, second, again])
    assert candidates(result, 0) == candidates(alone, 0)


def test_a_token_beyond_the_models_length_is_refused(make_bench: Callable[[], Any]) -> None:
    bench = make_bench()
    limit = MAX_MODEL_LEN
    tokens = [1 + i % 7 for i in range(limit)]
    new = plan_pb2.NewSequence(
        seq_id=1,
        token_ids=column(tokens),
        num_prompt_tokens=6,
        tables=block_table(range(-(-limit // 4))),
        sampling=CHOOSING,
    )
    execute(bench, 1, [Row(1, limit)], new_sequences=[new])
    with pytest.raises(InvalidPlan, match="in all"):
        execute(bench, 2, [Row(1)], appended_tokens=column([1, 5]))


@pytest.mark.parametrize(
    "plan",
    [{"forget_seq_ids": column([1, 1])}, {"appended_tokens": column([1, 5, 1, 6])}],
    ids=["forgotten", "appended"],
)
def test_a_plan_names_a_sequence_at_most_once(
    make_bench: Callable[[], Any], plan: dict[str, Any]
) -> None:
    bench = make_bench()
    started(bench)
    with pytest.raises(InvalidPlan, match=r"named twice|not known here"):
        execute(bench, 2, [], **plan)
