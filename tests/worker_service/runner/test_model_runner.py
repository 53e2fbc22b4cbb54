"""Steps of a model whose tokens show whether every slot, block and position was right."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from pagewire.v1 import plan_pb2, sampling_pb2
from tests.support.counting_model import VOCAB_SIZE, CountingModel, next_token
from tests.support.runners import RUNNERS, host, make_cache
from tests.support.worker_driver import (
    GREEDY,
    PlanBuilder,
    Row,
    block_table,
    column,
    sampler_params,
)
from worker_service.errors import InvalidPlan
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.plan import RowErrorReason, StepResult
from worker_service.runner.model_runner import ModelRunner
from worker_service.service import wire

NUM_BLOCKS = 64

MakeRunner = Callable[[CountingModel, CacheEngine, int], ModelRunner]


class Bench:
    """A runner and a plan builder that fit together."""

    def __init__(
        self,
        block_size: int = 4,
        poison: int | None = None,
        num_cpu_blocks: int = 8,
        max_model_len: int = 256,
        make_runner: MakeRunner = host,
    ) -> None:
        self.model = CountingModel(max_model_len, poison=poison)
        self.cache = make_cache(
            self.model, block_size, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=num_cpu_blocks
        )
        self.runner = make_runner(self.model, self.cache, block_size)
        self.plans = PlanBuilder(block_size=block_size)

    def step(self, rows: Sequence[Row], **fields: object) -> StepResult:
        return self.execute(self.plans.plan(rows, **fields))

    def execute(self, plan: plan_pb2.StepPlan) -> StepResult:
        return self.runner.launch(wire.decode_plan(plan, 0)).collect()


MakeBench = Callable[..., Bench]


@pytest.fixture(params=list(RUNNERS))
def make_bench(request: pytest.FixtureRequest) -> MakeBench:
    """One kind of runner after the other."""
    return partial(Bench, make_runner=RUNNERS[request.param])


def continuation(token_ids: Sequence[int], count: int) -> list[int]:
    """What greedy decoding appends to these tokens."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_ragged_prefills_and_decodes_see_their_whole_context(
    make_bench: MakeBench, block_size: int
) -> None:
    bench = make_bench(block_size)
    prompts = {1: [5], 2: [1, 2, 3, 4, 5, 6, 7], 3: [9] * 12}
    for seq_id, prompt in prompts.items():
        bench.plans.add(seq_id, prompt)
    results = [bench.step([Row(seq_id, len(prompt)) for seq_id, prompt in prompts.items()])]
    results += [bench.step([Row(3), Row(1), Row(2)]) for _ in range(6)]
    columns = [result.token_ids.tolist() for result in results]
    for seq_id, prompt in prompts.items():
        place = [3, 1, 2].index(seq_id)
        tokens = [columns[0][seq_id - 1], *(tokens[place] for tokens in columns[1:])]
        assert tokens == continuation(prompt, 7)


def test_an_already_computed_prefix_is_not_computed_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = list(range(10, 20))
    bench.plans.add(1, prompt)
    bench.step([Row(1, 10)])
    shared = bench.plans.tables[1][:2]
    bench.plans.add(2, [*prompt[:8], 50], num_computed_tokens=8, tables=block_table(shared))
    bench.plans.tables[2] = list(shared)
    bench.plans.lengths[2] = 8
    assert bench.step([Row(2, 1)]).token_ids.tolist() == [next_token([*prompt[:8], 50])]
    assert bench.model.batches[-1] == (1, 1)


def test_a_swap_out_frees_its_block_for_a_swap_in_and_a_copy_of_the_same_step(
    make_bench: MakeBench,
) -> None:
    bench = make_bench()
    cache, host = bench.cache.device_cache, bench.cache.host_cache
    cache[0], cache[1], cache[2], host[7] = 10, 11, 12, 70
    swaps = {"swap_out": column([0, 2, 1, 3]), "swap_in": column([7, 0, 2, 5])}
    bench.step([], **swaps, copy=column([2, 1, 1, 9]))
    blocks = (host[2], host[3], cache[0], cache[5], cache[1], cache[9])
    assert [int(block[0]) for block in blocks] == [
        10,
        11,
        70,
        10,  # by way of the host
        12,
        11,  # all sources of the copies are read first
    ]


def test_more_sequences_than_rows_are_admitted(make_bench: MakeBench) -> None:
    bench = make_bench(block_size=1, num_cpu_blocks=0)
    bench.model.batches.clear()
    rows = []
    for seq_id in range(1, 200):
        bench.plans.add(seq_id, [seq_id % VOCAB_SIZE])
        # All share one block: each computes one token and reads back its own.
        rows.append(Row(seq_id, 1))
    plan = bench.plans.plan(rows)
    updates = np.array([[seq_id, 0, 0, 0] for seq_id in range(1, 200)])
    plan.block_updates = column(updates.flatten())
    plan.output = bytes(199)
    bench.execute(plan)
    assert bench.model.batches[-1] == (199, 199)
    bench.step([], forget_seq_ids=column(range(1, 200)))  # it knows all of them


def test_a_poisoned_row_fails_with_a_reason_and_stays_failed_while_others_go_on(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(poison=96)
    bench.plans.add(1, [1, 2, 3])
    bench.plans.add(2, [1, 96, 3])
    bench.plans.add(3, [5])
    rows = [Row(1, 3), Row(2, 3), Row(3, 1)]
    first = bench.step(rows)
    # The core has sent this one before it could know of the failure.
    second = bench.step([Row(1), Row(2), Row(3)])
    assert first.token_ids.tolist() == [next_token([1, 2, 3]), -1, next_token([5])]
    assert second.token_ids.tolist() == [
        continuation([1, 2, 3], 2)[1],
        -1,
        continuation([5], 2)[1],
    ]
    for result in (first, second):
        assert result.errors == {1: RowErrorReason.NON_FINITE_LOGITS}


def test_forks_of_a_failed_parent_fail_with_it(make_bench: MakeBench) -> None:
    bench = make_bench(poison=96)
    bench.plans.add(1, [96])
    bench.plans.grow(1, 1)
    bench.plans.lengths[1] = 0
    bench.plans.fork(2, 1, sampling=GREEDY, choice_index=1)
    first = bench.step([Row(1, 1), Row(2, 0)])
    bench.plans.fork(3, 1, sampling=GREEDY, choice_index=2)
    second = bench.step([Row(2, 1), Row(3, 0)])
    assert first.token_ids.tolist() == second.token_ids.tolist() == [-1, -1]
    assert list(first.errors) == list(second.errors) == [0, 1]


BAD_SEQUENCES = {
    "no tokens": ({"token_ids": b"", "num_prompt_tokens": 0}, "num_prompt_tokens"),
    "no prompt": ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
    "too many blocks": ({"tables": block_table([0] * 65)}, "block_ids"),
    "NaN temperature": ({"sampling": sampler_params(temperature=float("nan"))}, "temperature"),
    "top_p": ({"sampling": sampler_params(top_p=0.0)}, "top_p"),
    "min_p": ({"sampling": sampler_params(min_p=1.5)}, "min_p"),
    "tiny temperature": ({"sampling": sampler_params(temperature=1e-38)}, "temperature"),
    "repetition": ({"sampling": sampler_params(repetition_penalty=0.0)}, "repetition_penalty"),
    "tiny repetition": (
        {"sampling": sampler_params(repetition_penalty=1e-38)},
        "repetition_penalty",
    ),
    "presence": ({"sampling": sampler_params(presence_penalty=1e39)}, "presence_penalty"),
    "bias": ({"sampling": sampler_params(logit_bias=[{"token_id": 97}])}, "bias_token_ids"),
    "large bias": (
        {"sampling": sampler_params(logit_bias=[{"token_id": 2**32 - 1}])},
        "bias_token_ids",
    ),
    "bias value": (
        {"sampling": sampler_params(logit_bias=[{"token_id": 1, "bias": float("inf")}])},
        "bias",
    ),
    "empty bad word": ({"sampling": sampler_params(bad_words=[{}])}, "token_ids"),
    "logprobs": ({"sampling": sampler_params(logprobs=5000)}, "logprobs"),
    "schema": (
        {"sampling": sampler_params(constraint=sampling_pb2.Constraint(json_schema="{"))},
        "constraint",
    ),
    "schema of nothing": (
        {"sampling": sampler_params(constraint=sampling_pb2.Constraint(json_schema="7"))},
        "constraint",
    ),
}


@pytest.mark.parametrize(("fields", "named"), BAD_SEQUENCES.values(), ids=BAD_SEQUENCES)
def test_a_sequence_that_cannot_be_is_refused(
    make_bench: MakeBench, fields: dict[str, object], named: str
) -> None:
    bench = make_bench()
    bench.plans.add(1, [1])
    bench.step([Row(1, 1)])
    sound = {"seq_id": 2, "token_ids": column([1, 2]), "num_prompt_tokens": 2, "sampling": GREEDY}
    new = plan_pb2.NewSequence(**(sound | fields))
    with pytest.raises(InvalidPlan) as raised:
        bench.execute(plan_pb2.StepPlan(new_sequences=[new]))
    assert raised.value.field.rsplit(".", 1)[-1] == named
    assert raised.value.field.startswith("new_sequences[0].")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([Row(2, 0), Row(1, 3)], "computes nothing in a row before it"),
        ([Row(2, 0)], "computes nothing in a row before it"),
        ([Row(1, 2, sample=False), Row(2, 0)], "does not compute up to its last token"),
        ([Row(1, 3), Row(2, 0, sample=False)], "only a new fork that samples"),
    ],
)
def test_a_fork_without_tokens_needs_its_parents_last_logits(
    make_bench: MakeBench, rows: list[Row], problem: str
) -> None:
    bench = make_bench()
    bench.plans.add(1, [1, 2, 3])
    bench.plans.grow(1, 3)
    bench.plans.lengths[1] = 0
    bench.plans.fork(2, 1, sampling=GREEDY, choice_index=1)
    with pytest.raises(InvalidPlan, match=problem):
        bench.step(rows)


def test_a_fork_without_tokens_needs_a_parent_without_drafts(make_bench: MakeBench) -> None:
    """Its logits would be those after the last draft."""
    bench = make_bench()
    bench.plans.add(1, [1, 2, 3])
    bench.plans.grow(1, 3)
    bench.plans.lengths[1] = 0
    bench.plans.fork(2, 1, sampling=GREEDY, choice_index=1)
    with pytest.raises(InvalidPlan, match="lookahead: row 0 has drafts"):
        bench.step([Row(1, 3), Row(2, 0)], lookahead=bytes([1, 0]))
