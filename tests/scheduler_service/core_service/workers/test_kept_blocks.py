"""What the ranks of a group have kept in common is what the next core may find."""

from dataclasses import replace

from scheduler_service.core.config import KeptSequence
from scheduler_service.core_service.workers.kept_blocks import (
    RankReport,
    common_blocks,
    common_sequence,
)

AHEAD = KeptSequence(
    token_ids=[3, 1, 4, 1, 5],
    context=(),
    tables={0: (0, [7, 8, 9]), 1: (2, [5]), 2: (0, [1, 2])},
)
BEHIND = KeptSequence(
    token_ids=[3, 1, 4, 1],
    context=(),
    tables={0: (0, [7, 8]), 1: (1, [4, 5]), 2: (0, [1, 2])},
)


def test_equal_reports_are_used_as_they_are() -> None:
    assert common_sequence([AHEAD, replace(AHEAD)]) is AHEAD


def test_a_rank_that_is_behind_leaves_fewer_tokens_and_no_state() -> None:
    for ranks in ([AHEAD, BEHIND], [BEHIND, AHEAD]):
        common = common_sequence(ranks)
        assert common.token_ids == BEHIND.token_ids
        assert common.tables == {0: (0, [7, 8]), 1: (2, [5]), 2: (0, [1, 2])}
        assert not common.is_exact


def test_blocks_after_one_that_a_rank_has_replaced_are_not_used() -> None:
    other = replace(AHEAD, tables=AHEAD.tables | {0: (0, [7, 6, 9])})
    assert common_sequence([AHEAD, other]).tables[0] == (0, [7])


def test_only_sequences_of_all_ranks_are_used() -> None:
    ranks = [
        RankReport(key_seed=1, sequences={1: AHEAD, 2: BEHIND}),
        RankReport(key_seed=1, sequences={2: BEHIND, 3: AHEAD}),
    ]
    assert common_blocks(ranks).sequences == [BEHIND]
    assert common_blocks([*ranks, RankReport()]).sequences == []
