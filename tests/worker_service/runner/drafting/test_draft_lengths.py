"""Numbers of drafts, chosen from how often they are right and what they cost."""

from random import Random

import numpy as np
import pytest

from worker_service.runner.drafting.speculation import DraftLengths, Proposal

ROWS = [Proposal(row_id, 4) for row_id in range(3)]


def run(
    lengths: DraftLengths,
    rows: list[Proposal],
    num_right: dict[int, int],
    cost: float,
    num_steps: int,
) -> list[list[int]]:
    """Numbers of drafts of steps that take 1,000 us and `cost` us more for each draft, of which the
    first `num_right` of a row are right."""
    chosen = []
    for _ in range(num_steps):
        counts = lengths.choose(rows, len(rows), len(rows))
        for (row_id, *_), count in zip(rows, counts, strict=True):
            if count:
                lengths.record_drafts(row_id, count, min(count, num_right.get(row_id, 0)))
        lengths.record_step(len(rows) + sum(counts), int(1000 + cost * sum(counts)))
        chosen.append(counts)
    return chosen


def test_drafts_that_cost_nothing_are_all_computed() -> None:
    chosen = run(DraftLengths(), ROWS, {0: 4, 1: 4, 2: 4}, cost=0, num_steps=50)
    assert chosen[0] == chosen[-1] == [4, 4, 4]


def test_drafts_that_cost_as_much_as_tokens_are_not_worth_it() -> None:
    """In a batch that the multipliers bound, a draft costs a row's share of the step."""
    chosen = run(DraftLengths(), ROWS, {0: 4, 1: 2}, cost=1000 / 3, num_steps=200)
    assert sum(sum(counts) for counts in chosen[20:]) <= 0.1 * 180 * 12


def test_rows_whose_drafts_are_right_have_more_of_them() -> None:
    chosen = run(DraftLengths(), ROWS, {0: 4, 1: 1}, cost=100, num_steps=100)
    last = chosen[-20:]
    means = [sum(counts[row] for counts in last) / len(last) for row in range(3)]
    assert means[0] == 4
    assert 0.5 <= means[1] <= 2.5
    assert means[2] <= 0.5


@pytest.mark.parametrize("cost", [20, 200])
def test_what_was_not_worth_its_time_is_tried_again(cost: int) -> None:
    lengths = DraftLengths()
    row = ROWS[:1]
    num_wrong = sum(map(sum, run(lengths, row, {}, cost, 300)[100:]))
    assert 0 < num_wrong * cost <= 0.05 * 200 * 1000, "five percent of the steps' time"
    assert sum(map(sum, run(lengths, row, {0: 4}, cost, 200)[100:])) >= 300


def test_drafts_that_followed_more_tokens_are_judged_by_themselves() -> None:
    """Those that followed one token are always wrong, those that followed five always right."""
    lengths = DraftLengths()
    chosen: dict[int, list[int]] = {1: [], 5: []}
    for step in range(200):
        num_matched = (1, 5)[step % 2]
        (count,) = lengths.choose([Proposal(0, 4, num_matched)], 1, 1)
        if count:
            lengths.record_drafts(0, count, count if num_matched == 5 else 0)
        lengths.record_step(1 + count, 1000 + 50 * count)
        chosen[num_matched].append(count)
    assert sum(chosen[1][50:]) <= 10
    assert chosen[5][50:].count(4) >= 48


def test_a_row_that_another_sequence_has_now_begins_anew() -> None:
    lengths = DraftLengths()
    run(lengths, ROWS, {0: 4, 1: 4}, cost=50, num_steps=100)
    assert lengths.choose(ROWS, 3, 3)[2] == 0
    lengths.forget(np.array([2]))
    assert lengths.choose(ROWS, 3, 3)[2] >= 1


@pytest.mark.parametrize("cost", [20, 900])
def test_other_processes_do_not_hide_what_drafts_cost(cost: int) -> None:
    """Steps take up to three times as long while other processes run, for some steps at a time."""
    draw, lengths, chosen, load = Random(cost), DraftLengths(), [], 1.0
    for _ in range(600):
        if draw.random() < 0.05:
            load = draw.choice((1.0, 1.0, 1.6, 3.0))
        (count,) = lengths.choose([Proposal(0, draw.choice((0, 4, 4, 8)))], 1, 1)
        if count:
            lengths.record_drafts(
                0, count, sum(draw.random() < 0.8**k for k in range(1, 1 + count))
            )
        lengths.record_step(1 + count, int((1000 + cost * count) * load * draw.uniform(0.9, 1.1)))
        chosen.append(count)
    mean = sum(chosen[100:]) / 500
    assert mean > 3 if cost == 20 else mean < 0.5


def test_a_sequence_that_repeats_nothing_is_searched_less_often() -> None:
    lengths = DraftLengths()
    searched = []
    for num_tokens in range(400):
        if lengths.is_due(0, num_tokens):
            searched.append(num_tokens)
            assert lengths.choose([Proposal(0, 0)], 1, 1) == [0]
        assert lengths.is_due(1, num_tokens), "other sequences are not affected"
    assert searched[:8] == [0, 1, 2, 3, 4, 6, 8, 10]
    assert searched[-3:] == [352 + 16 * n for n in range(3)]
    assert lengths.choose([Proposal(0, 4, 8)], 1, 1) == [4]
    assert all(lengths.is_due(0, num_tokens) for num_tokens in range(400, 408)), "then again"
