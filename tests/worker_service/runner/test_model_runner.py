"""Steps of a model whose tokens show whether every slot, block and position was right."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from pagewire.v1 import plan_pb2, sampling_pb2
from tests.support.counting_model import VOCAB_SIZE, CountingModel, next_token
from tests.support.runners import RUNNERS, host
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
        self.cache = CacheEngine(
            self.model.kv_cache_spec,
            block_size=block_size,
            num_gpu_blocks=NUM_BLOCKS,
            num_cpu_blocks=num_cpu_blocks,
            device=torch.device("cpu"),
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


def test_prefill_in_chunks_beside_decodes_gives_the_same_tokens(make_bench: MakeBench) -> None:
    bench = make_bench()
    long, short = list(range(20)), [3, 1]
    bench.plans.add(1, long)
    bench.plans.add(2, short)
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for size in (6, 1, 9):
        result = bench.step([Row(2, 2 if not tokens[2] else 1), Row(1, size, sample=False)])
        tokens[2] += result.token_ids.tolist()
    for rows in ([Row(2), Row(1, 4)], [Row(2), Row(1)]):
        result = bench.step(rows)
        tokens[2].append(int(result.token_ids[0]))
        tokens[1].append(int(result.token_ids[1]))
    assert tokens == {1: continuation(long, 2), 2: continuation(short, 5)}


def test_a_resubmitted_sequence_goes_on_as_if_undisturbed(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = [4, 8, 15, 16]
    done = continuation(prompt, 3)
    bench.plans.add(7, prompt + done, num_prompt_tokens=4)
    assert bench.step([Row(7, 7)]).token_ids.tolist() == continuation(prompt, 4)[3:]


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


def test_forks_sample_from_their_parents_last_logits_and_share_its_blocks(
    make_bench: MakeBench,
) -> None:
    bench = make_bench()
    prompt = [3, 1, 4, 1, 5]
    sampling = sampler_params(seed=9)
    bench.plans.add(1, prompt, sampling=sampling)
    bench.step([Row(1, 3, sample=False)])
    bench.plans.grow(1, 2)
    bench.plans.lengths[1] -= 2
    for choice in (1, 2):
        bench.plans.fork(1 + choice, 1, sampling=sampling, choice_index=choice)
    bench.plans.lengths[2] = bench.plans.lengths[3] = 5
    first = bench.step([Row(1, 2), Row(2, 0), Row(3, 0)]).token_ids.tolist()
    # The parent alone: two tokens, or four in a padded batch.
    assert bench.model.batches[-1] in ((1, 2), (4, 4))
    for choice in range(3):
        alone = make_bench()
        alone.plans.add(1, prompt, sampling=sampling, choice_index=choice)
        assert alone.step([Row(1, 5)]).token_ids.tolist() == [first[choice]]
    assert len(set(first)) > 1


def test_a_fork_goes_on_by_itself_after_copy_on_write(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = [3, 1, 4, 1, 5]
    bench.plans.add(1, prompt)
    bench.plans.grow(1, 5)
    bench.plans.lengths[1] = 0
    bench.plans.fork(2, 1, sampling=GREEDY, choice_index=1)
    bench.plans.tables[2] = list(bench.plans.tables[1])
    bench.plans.lengths[2] = 5
    assert bench.step([Row(1, 5), Row(2, 0)]).token_ids.tolist() == continuation(prompt, 1) * 2
    # The second block is shared and about to be written to: sequence 2 gets a copy of it.
    shared, copy = bench.plans.tables[1][1], 40
    bench.plans.tables[2][1] = copy
    updates = column([2, 0, 1, copy])
    bench.step([Row(1), Row(2)], copy=column([shared, copy]), block_updates=updates)
    tokens = [bench.step([Row(1), Row(2)]).token_ids.tolist() for _ in range(4)]
    expected = continuation(prompt, 6)[2:]
    assert tokens == [[token, token] for token in expected]


def test_swapping_out_and_in_to_other_blocks_changes_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = [6, 2, 6, 2, 6, 2]
    bench.plans.add(1, prompt)
    bench.step([Row(1, 6)])
    first, second = bench.plans.tables[1]
    bench.step([], swap_out=column([first, 5, second, 3]))
    bench.cache.device_cache[first] = bench.cache.device_cache[second] = 0
    bench.plans.tables[1] = [30, 31]
    assert bench.step([], swap_in=column([5, 30, 3, 31])).token_ids.tolist() == []
    result = bench.step([Row(1)], block_updates=column([1, 0, 0, 30, 1, 0, 1, 31]))
    assert result.token_ids.tolist() == continuation(prompt, 2)[1:]


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


def test_forgotten_sequences_make_room_and_their_ids_may_return(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.plans.add(1, [1, 2])
    bench.step([Row(1, 2)])
    bench.plans.add(1, [7, 7, 7])
    assert bench.step([Row(1, 3)], forget_seq_ids=column([1])).token_ids.tolist() == [
        next_token([7, 7, 7])
    ]
    bench.step([], forget_seq_ids=column([1]))
    with pytest.raises(InvalidPlan, match="sequence 1 is not known here"):
        bench.step([], forget_seq_ids=column([1]))


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


def test_excluding_every_token_fails_the_row_alone(make_bench: MakeBench) -> None:
    bench = make_bench()
    bad_words = [{"token_ids": column([token])} for token in range(VOCAB_SIZE)]
    bench.plans.add(1, [1], sampling=sampler_params(bad_words=bad_words))
    bench.plans.add(2, [1])
    result = bench.step([Row(1), Row(2)])
    assert result.errors == {0: RowErrorReason.NO_CANDIDATES}
    assert result.token_ids.tolist() == [-1, next_token([1])]


@pytest.mark.parametrize("chunks", [[10], [3, 7], [1, 1, 8]])
@pytest.mark.parametrize("start", [0, 1, 5, 9])
def test_prompt_logprobs_are_the_same_in_any_chunks(
    make_bench: MakeBench, chunks: list[int], start: int
) -> None:
    bench = make_bench()
    prompt = [5, 11, 2, 60, 7, 33, 90, 1, 0, 4]
    bench.plans.add(
        1,
        prompt,
        sampling=sampler_params(temperature=0.0, prompt_logprobs=2),
        prompt_logprobs_start=start,
    )
    entries = []
    for index, size in enumerate(chunks):
        result = bench.step([Row(1, size, sample=index == len(chunks) - 1)])
        entries += result.prompt_logprobs.values()
    positions = [
        entry.start + offset for entry in entries for offset in range(len(entry.token_ids))
    ]
    assert positions == list(range(max(1, start), 10))
    tokens = np.concatenate([entry.token_ids for entry in entries])
    logprobs = np.concatenate([entry.logprobs for entry in entries])
    ranks = np.concatenate([entry.ranks for entry in entries])
    for line, position in enumerate(positions):
        best = next_token(prompt[:position])
        assert tokens[line].tolist() == [prompt[position], best, (best + 1) % VOCAB_SIZE]
        assert ranks[line] == 1 + (prompt[position] - best) % VOCAB_SIZE
        gap = 0.125 * ((prompt[position] - best) % VOCAB_SIZE)
        assert logprobs[line, 1] - logprobs[line, 0] == pytest.approx(gap, abs=1e-5)


def test_prompt_logprobs_of_generated_tokens_are_not_reported(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.plans.add(
        1, [1, 2, 3, 4, 5], num_prompt_tokens=3, sampling=sampler_params(prompt_logprobs=0)
    )
    (entry,) = bench.step([Row(1, 5)]).prompt_logprobs.values()
    assert (entry.start, entry.token_ids.tolist()) == (1, [[2], [3]])


def test_a_step_without_rows_is_answered(make_bench: MakeBench) -> None:
    result = make_bench().step([])
    assert (result.step_id, result.token_ids.tolist()) == (1, [])


BAD_PLANS = {
    "unknown sequence": ({"seq_ids": column([9]), "num_tokens": column([1])}, "seq_ids"),
    "forgotten before": ({"forget_seq_ids": column([9])}, "forget_seq_ids"),
    "forgotten twice": ({"forget_seq_ids": column([1, 1])}, "forget_seq_ids"),
    "two rows": ({"seq_ids": column([1, 1]), "num_tokens": column([1, 1])}, "seq_ids"),
    "too many tokens": ({"seq_ids": column([1]), "num_tokens": column([5])}, "num_tokens"),
    "samples too early": ({"seq_ids": column([1]), "num_tokens": column([2])}, "output"),
    "no tokens": ({"seq_ids": column([1]), "num_tokens": column([0])}, "num_tokens"),
    "negative": ({"seq_ids": column([1]), "num_tokens": column([-1])}, "num_tokens"),
    "block out of range": ({"block_updates": column([1, 0, 0, NUM_BLOCKS])}, "block_updates"),
    "negative block": ({"block_updates": column([1, 0, 0, -1])}, "block_updates"),
    "gap in the table": ({"block_updates": column([1, 0, 2, 5])}, "block_updates"),
    "beyond the table": ({"block_updates": column([1, 0, 64, 5])}, "block_updates"),
    "blocks of nobody": ({"block_updates": column([9, 0, 0, 5])}, "block_updates"),
    "swap out of range": ({"swap_out": column([0, 8])}, "swap_out"),
    "swap in from nowhere": ({"swap_in": column([-1, 0])}, "swap_in"),
    "copy out of range": ({"copy": column([0, NUM_BLOCKS])}, "copy"),
    "half a pair": ({"copy": column([0])}, "copy"),
    "half a number": ({"seq_ids": b"\0\0\0"}, "seq_ids"),
    "rows and lengths": ({"seq_ids": column([1]), "num_tokens": column([1, 2])}, "num_tokens"),
    "rows and flags": ({"seq_ids": column([1]), "output": b"\1\1"}, "output"),
}


@pytest.mark.parametrize(("fields", "named"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_contradicts_itself_or_the_worker_is_refused(
    make_bench: MakeBench, fields: dict[str, bytes], named: str
) -> None:
    bench = make_bench()
    bench.plans.add(1, [1, 2, 3])
    bench.plans.plan([])  # builds, and drops, the plan with the new sequence
    new = plan_pb2.NewSequence(
        seq_id=1, token_ids=column([1, 2, 3]), num_prompt_tokens=3, sampling=GREEDY
    )
    bench.execute(plan_pb2.StepPlan(epoch=1, step_id=1, new_sequences=[new]))
    with pytest.raises(InvalidPlan) as raised:
        bench.execute(plan_pb2.StepPlan(epoch=1, step_id=2, **fields))
    assert raised.value.field == named


def test_a_row_without_the_blocks_it_needs_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench()
    new = plan_pb2.NewSequence(
        seq_id=1,
        token_ids=column([1, 2, 3, 4, 5]),
        num_prompt_tokens=5,
        sampling=GREEDY,
        tables=block_table([0]),
    )
    plan = plan_pb2.StepPlan(new_sequences=[new], seq_ids=column([1]), num_tokens=column([5]))
    with pytest.raises(InvalidPlan, match="lacks blocks"):
        bench.execute(plan)


BAD_SEQUENCES = {
    "id 0": ({"seq_id": 0}, "seq_id"),
    "known": ({"seq_id": 1}, "seq_id"),
    "no tokens": ({"token_ids": b"", "num_prompt_tokens": 0}, "num_prompt_tokens"),
    "no prompt": ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
    "more prompt than tokens": ({"num_prompt_tokens": 3}, "num_prompt_tokens"),
    "beyond the vocabulary": ({"token_ids": column([1, VOCAB_SIZE])}, "token_ids"),
    "negative token": ({"token_ids": column([1, -1])}, "token_ids"),
    "too long": ({"token_ids": column([1] * 257)}, "token_ids"),
    "computed without blocks": ({"num_computed_tokens": 1}, "num_computed_tokens"),
    "block out of range": ({"tables": block_table([NUM_BLOCKS])}, "block_ids"),
    "too many blocks": ({"tables": block_table([0] * 65)}, "block_ids"),
    "unknown parent": ({"parent_seq_id": 5}, "parent_seq_id"),
    "NaN temperature": ({"sampling": sampler_params(temperature=float("nan"))}, "temperature"),
    "top_p": ({"sampling": sampler_params(top_p=0.0)}, "top_p"),
    "min_p": ({"sampling": sampler_params(min_p=1.5)}, "min_p"),
    "repetition": ({"sampling": sampler_params(repetition_penalty=0.0)}, "repetition_penalty"),
    "presence": ({"sampling": sampler_params(presence_penalty=1e39)}, "presence_penalty"),
    "bias": ({"sampling": sampler_params(logit_bias=[{"token_id": 97}])}, "bias_token_ids"),
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
