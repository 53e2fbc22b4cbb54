"""Plans that keep the rules pass, and give the tokens of an undisturbed run."""

import pytest

from tests.support.simulated import Bench, undisturbed
from tests.support.worker_driver import Row, block_table, column, sampler_params
from worker_service.plan import RowErrorReason

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLED = sampler_params(seed=7)


def test_a_prompt_in_chunks_gives_the_tokens_of_one_in_a_piece() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT, sampling=SAMPLED)
    assert bench.tokens(Row(1, 3, sample=False)) == []
    tokens = bench.tokens(Row(1, 3)) + bench.decode(1, 9)
    assert tokens == undisturbed(PROMPT, 10, sampling=SAMPLED)
    assert len(set(tokens)) > 5


def test_tokens_do_not_depend_on_the_batch() -> None:
    bench = Bench()
    prompts = {seq_id: [seq_id, *PROMPT] for seq_id in range(1, 6)}
    sampling = {seq_id: sampler_params(seed=seq_id) for seq_id in prompts}
    for seq_id, prompt in prompts.items():
        bench.plans.add(seq_id, prompt, sampling=sampling[seq_id])
    steps = [bench.tokens(*(Row(seq_id, 7) for seq_id in prompts))]
    for number in range(4):  # in another order each time
        order = [1 + (seq_id + number) % 5 for seq_id in prompts]
        tokens = dict(zip(order, bench.tokens(*(Row(seq_id) for seq_id in order)), strict=True))
        steps.append([tokens[seq_id] for seq_id in prompts])
    together = list(zip(*steps, strict=True))
    for seq_id, prompt in prompts.items():
        alone = undisturbed(prompt, 5, sampling=sampling[seq_id])
        assert list(together[seq_id - 1]) == alone


@pytest.mark.parametrize("change", ["seed", "choice", "token", "prompt"])
def test_tokens_depend_on_everything_they_should(change: str) -> None:
    first = undisturbed(PROMPT, 12, sampling=SAMPLED)
    other = {
        "seed": lambda: undisturbed(PROMPT, 12, sampling=sampler_params(seed=8)),
        "choice": lambda: undisturbed(PROMPT, 12, sampling=SAMPLED, choice_index=1),
        "token": lambda: undisturbed([*PROMPT[:-1], 11], 12, sampling=SAMPLED),
        "prompt": lambda: undisturbed(PROMPT[::-1], 12, sampling=SAMPLED),
    }[change]()
    assert first != other


def test_greedy_tokens_do_not_depend_on_seed_or_choice() -> None:
    first = undisturbed(PROMPT, 8, sampling=sampler_params(temperature=0, seed=1))
    other = undisturbed(PROMPT, 8, sampling=sampler_params(temperature=0, seed=2), choice_index=3)
    assert first == other


def test_a_fork_shares_its_parents_blocks_and_copies_the_last_before_it_writes() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT, sampling=SAMPLED)
    bench.plans.grow(1, 6)
    bench.plans.lengths[1] -= 6
    bench.plans.fork(2, 1, sampling=SAMPLED, choice_index=1)
    outputs = [[token] for token in bench.tokens(Row(1, 6), Row(2, 0))]
    bench.plans.tables[2] = [0, 9]
    bench.plans.lengths[2] = 6
    for fields in ({"copy": column([1, 9]), "block_updates": column([2, 0, 1, 9])}, {}, {}):
        for output, token in zip(outputs, bench.tokens(Row(1), Row(2), **fields), strict=True):
            output.append(token)
    assert outputs[0] == undisturbed(PROMPT, 4, sampling=SAMPLED)
    assert outputs[1] == undisturbed(PROMPT, 4, sampling=SAMPLED, choice_index=1)


def test_a_sequence_goes_on_after_it_was_swapped_out_and_in_elsewhere() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT, sampling=SAMPLED)
    tokens = bench.tokens(Row(1, 6)) + bench.decode(1, 2)
    # Another sequence takes the blocks in the very step in which they are swapped out.
    bench.plans.next_block = 0
    bench.plans.add(2, [1, 2, 3, 4, 5, 6, 7, 8])
    bench.step(Row(2, 8), swap_out=column([0, 5, 1, 3]), forget_seq_ids=column([1]))
    # It comes back beside the other's rows, one step before its own.
    bench.step(Row(2), swap_in=column([5, 20, 3, 10]))
    bench.plans.add(
        1,
        PROMPT + tokens,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=8,
        tables=block_table([20, 10]),
        sampling=SAMPLED,
    )
    bench.plans.tables[1], bench.plans.lengths[1] = [20, 10], 8
    tokens += bench.tokens(Row(1), Row(2))[:1]
    tokens += bench.decode(1, 4)
    assert tokens == undisturbed(PROMPT, 8, sampling=SAMPLED)


def test_a_step_may_move_blocks_and_have_no_rows() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT)
    bench.step(Row(1, 6))
    result = bench.step(swap_out=column([0, 5]))
    assert len(result.token_ids) == 0
    assert len(bench.step(swap_in=column([5, 9])).token_ids) == 0


def test_a_block_that_is_swapped_out_may_be_read_in_the_same_step() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT)
    tokens = bench.tokens(Row(1, 6)) + bench.tokens(Row(1), swap_out=column([0, 5]))
    assert tokens == undisturbed(PROMPT, 2)


def test_a_sequence_goes_on_after_a_recompute() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT, sampling=SAMPLED)
    tokens = bench.tokens(Row(1, 6)) + bench.decode(1, 3)
    bench.plans.add(1, PROMPT + tokens, num_prompt_tokens=6, sampling=SAMPLED)
    bench.tokens(Row(1, 4, sample=False), forget_seq_ids=column([1]))
    tokens += bench.tokens(Row(1, 6)) + bench.decode(1, 2)
    assert tokens == undisturbed(PROMPT, 7, sampling=SAMPLED)


def test_a_cached_prefix_is_read_by_those_that_share_it_even_after_its_writer_left() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT)
    bench.step(Row(1, 6))
    for seq_id, forgotten in ((2, []), (3, [1])):
        bench.plans.add(seq_id, [*PROMPT[:4], 50], num_computed_tokens=4, tables=block_table([0]))
        bench.plans.tables[seq_id], bench.plans.lengths[seq_id] = [0], 4
        tokens = bench.tokens(Row(seq_id, 1), forget_seq_ids=column(forgotten))
        assert tokens == undisturbed([*PROMPT[:4], 50], 1)


def test_suppressed_tokens_are_held_back_until_there_are_min_tokens() -> None:
    greedy = undisturbed(PROMPT, 1)
    sampling = sampler_params(temperature=0, min_tokens=1, suppressed_token_ids=column(greedy))
    other = undisturbed(PROMPT, 2, sampling=sampling)
    assert other[0] != greedy[0]
    sampling = sampler_params(temperature=0, min_tokens=1, suppressed_token_ids=column(other[1:]))
    assert undisturbed([*PROMPT, other[0]], 1, sampling=sampling) != other[1:]
    assert undisturbed(PROMPT, 2, sampling=sampling)[0] == greedy[0]


def test_a_sequence_whose_every_token_is_suppressed_fails_alone_and_stays_failed() -> None:
    bench = Bench(vocab_size=12)
    bench.plans.add(1, [1, 2])
    everything = sampler_params(min_tokens=5, suppressed_token_ids=column(range(12)))
    bench.plans.add(2, [1, 2], sampling=everything)
    for num_tokens in (2, 1):
        result = bench.step(Row(1, num_tokens), Row(2, num_tokens))
        assert result.token_ids[0] >= 0
        assert result.token_ids[1] == -1
        assert result.errors == {1: RowErrorReason.NO_CANDIDATES}


def test_log_probabilities_fit_the_tokens_and_add_up_to_one() -> None:
    bench = Bench(vocab_size=12)
    bench.plans.add(1, [1, 2], sampling=sampler_params(seed=3, logprobs=20))
    entry = bench.step(Row(1, 2)).logprobs[0]
    assert sorted(entry.token_ids[1:].tolist()) == list(range(12))
    assert sum(2.718281828 ** entry.logprobs[1:]) == pytest.approx(1.0)
    assert entry.token_ids[entry.rank] == entry.token_ids[0]
    assert entry.logprobs[entry.rank] == entry.logprobs[0]


def test_prompt_log_probabilities_are_the_same_in_chunks() -> None:
    sampling = sampler_params(temperature=0, logprobs=2, prompt_logprobs=2)
    whole, chunked = Bench(), Bench()
    for bench in (whole, chunked):
        bench.plans.add(1, PROMPT, sampling=sampling, prompt_logprobs_start=2)
    entry = whole.step(Row(1, 6)).prompt_logprobs[0]
    first = chunked.step(Row(1, 3, sample=False)).prompt_logprobs[0]
    second = chunked.step(Row(1, 3)).prompt_logprobs[0]
    assert (entry.start, first.start, second.start) == (2, 2, 4)
    assert entry.token_ids[:, 0].tolist() == PROMPT[2:]
    assert [*first.token_ids.tolist(), *second.token_ids.tolist()] == entry.token_ids.tolist()
    assert [*first.logprobs.tolist(), *second.logprobs.tolist()] == entry.logprobs.tolist()
    # What the model finds most probable after five tokens, it finds so in a prompt of six.
    shorter = Bench()
    shorter.plans.add(1, PROMPT[:5], sampling=sampling)
    top = shorter.step(Row(1, 5)).logprobs[0]
    assert top.token_ids[1:].tolist() == entry.token_ids[-1, 1:].tolist()


def test_a_reset_runner_has_forgotten_sequences_and_blocks() -> None:
    bench = Bench()
    bench.plans.add(1, PROMPT)
    bench.step(Row(1, 6))
    bench.runner.reset()
    bench.plans.add(1, PROMPT)
    assert bench.tokens(Row(1, 6)) == undisturbed(PROMPT, 1)
