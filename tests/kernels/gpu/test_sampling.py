"""A step's inputs, edits, sampling and log probabilities on the GPU against the reference."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagewire_kernels import philox, reference
from pagewire_kernels.batch import (
    FIRST_DRAFT,
    NO_CANDIDATES,
    NON_FINITE,
    NOT_SAMPLED,
    OFF_CONSTRAINT,
    SamplingRows,
    SamplingTables,
    StepInputs,
)
from pagewire_kernels.triton import accept, edit, gather_logprobs, prepare, sample, sampling_kernels
from tests.support.gpu_kernels import DEVICE, MARKS, on_device
from tests.support.sampling_tables import EVER, Sampled, tables_of

pytestmark = MARKS

VOCAB_SIZE = 300
BANNED = -torch.inf


def _rows(
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
) -> list[Sampled]:
    n = len(temperature)
    columns = (temperature, top_k or [0] * n, top_p or [1.0] * n, min_p or [0.0] * n)
    return [
        Sampled(
            {
                "temperature": heat,
                "top_k": k,
                "top_p": p,
                "min_p": least,
                "seed": row * 77,
                "choice_index": row % 3,
            },
            position=row,
        )
        for row, (heat, k, p, least) in enumerate(zip(*columns, strict=True))
    ]


def _logits(num_rows: int, spread: float = 3.0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, vocab_size, generator=draw) * spread


def _by_reference(
    logits: torch.Tensor, rows: SamplingRows, tables: SamplingTables
) -> tuple[torch.Tensor, list[int]]:
    """The edited logits, and the outcomes; the tables change."""
    edited, outcome = logits.clone(), torch.zeros(len(logits), dtype=torch.int64)
    sound = reference.edit(edited, rows, tables)
    reference.sample(edited, sound, rows, tables, outcome)
    return edited, outcome.tolist()


def _by_kernels(
    logits: torch.Tensor, rows: SamplingRows, tables: SamplingTables, **options: int
) -> tuple[torch.Tensor, list[int]]:
    """The same with the kernels, for tables on the device."""
    edited = logits.to(DEVICE, copy=True)
    outcome = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    rows = on_device(rows)
    sound = edit(edited, rows, tables)
    sample(edited, sound, rows, tables, outcome, **options)
    return edited.cpu(), outcome.tolist()


def _both(logits: torch.Tensor, sampled: list[Sampled], **options: int) -> list[list[int]]:
    """Outcomes of the kernels and of the reference, which leave the same logits and tables."""
    rows, tables = tables_of(sampled, logits.shape[1])
    ours = on_device(_copy(tables))
    edited, outcome = _by_kernels(logits, rows, ours, **options)
    expected_edited, expected = _by_reference(logits, rows, tables)
    torch.testing.assert_close(edited, expected_edited, atol=0, rtol=0, equal_nan=True)
    assert ours.latest.cpu().equal(tables.latest)
    assert ours.counts.cpu().equal(tables.counts)
    return [outcome, expected]


def _copy(tables: SamplingTables) -> SamplingTables:
    return SamplingTables(**{name: getattr(tables, name).clone() for name in tables.__slots__})


@triton.jit
def _draw(output, seeds, choice_indices, positions, num_rows, TILE: tl.constexpr):
    row = tl.arange(0, TILE)
    mask = row < num_rows
    draws = sampling_kernels.uniform(
        tl.load(seeds + row, mask, other=0),
        tl.load(choice_indices + row, mask, other=0),
        tl.load(positions + row, mask, other=0),
    )
    tl.store(output + row, draws, mask)


def test_draws_are_the_workers_own_to_the_bit() -> None:
    random = np.random.default_rng(0)
    seeds = random.integers(0, 2**64, 200, dtype=np.uint64)
    choices = random.integers(0, 2**31, 200, dtype=np.uint32)
    positions = random.integers(0, 2**31, 200)
    expected = philox.uniform(seeds, choices, positions)
    columns = [
        torch.from_numpy(seeds.view(np.int64)),
        torch.from_numpy(choices.astype(np.int32)),
        torch.from_numpy(positions.astype(np.int32)),
    ]
    draws = torch.empty(200, dtype=torch.float64, device=DEVICE)
    _draw[(1,)](
        draws, *[column.to(DEVICE) for column in columns], 200, TILE=256, enable_fp_fusion=False
    )
    assert np.array_equal(draws.cpu().numpy(), expected)


@pytest.mark.parametrize("capacity", [16, 512])
def test_filtered_rows_get_the_references_tokens(capacity: int) -> None:
    sampled = _rows(
        temperature=[1.0, 0.7, 1.3, 1.0, 2.0, 1.0, 0.5, 1.0],
        top_k=[5, 0, 0, 40, 70, 1, 9000, 50],
        top_p=[1.0, 0.9, 1.0, 0.8, 0.95, 1.0, 0.999, 0.0],
        min_p=[0.0, 0.0, 0.05, 0.01, 0.0, 0.0, 0.0, 0.0],
    )
    ours, expected = _both(_logits(8), sampled, capacity=capacity)
    assert ours == expected


def test_rows_of_several_tiles_get_the_references_tokens() -> None:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 10_000, generator=draw) * 2
    logits[0, [4500, 9999]] = 40.0
    logits[1, :9000] = -torch.inf  # all weight is in the last tile
    sampled = _rows(
        temperature=[0.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 0.0],
        top_k=[0, 0, 0, 0, 300, 0, 4000, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.99, 1.0],
        min_p=[0.0] * 7 + [0.5],
    )
    ours, expected = _both(logits, sampled)
    assert ours == expected
    assert ours[0] == 4500
    assert ours[1] >= 9000
    assert len({token // 4096 for token in ours}) == 3


def test_equal_logits_at_the_cut_all_stay() -> None:
    logits = torch.full((12, VOCAB_SIZE), -5.0)
    logits[:, [3, 99, 250]] = 4.0
    sampled = _rows([1.0] * 12, top_k=[2] * 12)
    ours, expected = _both(logits, sampled)
    assert ours == expected
    assert set(ours) == {3, 99, 250}


@pytest.mark.parametrize(
    ("dtype", "vocab_size"), [(torch.float32, 300), (torch.float16, 300), (torch.float32, 10_000)]
)
def test_log_probabilities_agree_with_the_reference(dtype: torch.dtype, vocab_size: int) -> None:
    logits = _logits(4, vocab_size=vocab_size).to(dtype)
    tokens = torch.randint(0, vocab_size, (4, 5), generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = logits[0].argmax()
    logprobs, ranks = gather_logprobs(logits.to(DEVICE), tokens.to(DEVICE))
    expected_logprobs, expected_ranks = reference.gather_logprobs(logits, tokens)
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, atol=1e-5, rtol=1e-5)
    assert ranks.tolist() == expected_ranks.tolist()
    assert ranks[0] == 1


EDITED: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"edits": [(3, 2.5, EVER), (290, -4.0, EVER), (17, 100.0, EVER)]},
    "excluded": {"edits": [(token, BANNED, EVER) for token in (*range(280), 3, 3)]},
    "excluded and biased": {"edits": [(3, 5.0, EVER), (3, BANNED, EVER), (4, 99.0, EVER)]},
    "not to end yet": {"edits": [(5, BANNED, 8), (6, BANNED, 7)], "position": 7},
    "many biases": {"edits": [(token, token % 7 - 3.0, EVER) for token in range(250)]},
    "penalties": {
        "occurrences": {2: 0, 7: 3, 150: 1, 299: 40},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.5,
    },
    "a penalty that rewards": {"occurrences": {2: 4, 9: 1}, "frequency_penalty": -1.5},
    "a bitmask": {"allowed": range(0, 300, 7)},
    "one token allowed": {"allowed": [299]},
    "all at once": {
        "edits": [(14, 9.0, EVER), (21, BANNED, EVER), (28, 1.0, EVER)],
        "occurrences": {14: 2, 28: 1, 7: 0},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.7,
        "allowed": range(0, 300, 7),
    },
}


def _edited(temperature: float, **given: Any) -> Sampled:
    names = ("edits", "occurrences", "allowed", "has_constraint_failed", "position", "latest")
    rest = {name: given.pop(name) for name in names if name in given}
    return Sampled({"temperature": temperature, "seed": 5, **given}, **rest)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_edited_rows_get_the_references_logits_and_tokens(temperature: float) -> None:
    sampled = [_edited(temperature, **edits) for edits in EDITED.values()]
    ours, expected = _both(_logits(len(sampled)), sampled)
    assert ours == expected
    assert ours[list(EDITED).index("one token allowed")] == 299
    assert ours[list(EDITED).index("excluded")] >= 280


def test_edits_reach_every_tile_of_a_row() -> None:
    biased = [(token, 30.0 + token / 1000, EVER) for token in (5, 4095, 4096, 9000)]
    sampled = [
        _edited(0.0, edits=biased),
        _edited(0.0, edits=[*biased, (9000, BANNED, EVER)]),
        _edited(0.0, edits=biased, occurrences={9000: 9}, frequency_penalty=2.0),
        _edited(0.0, edits=biased, allowed=[5, 4095]),
    ]
    ours, expected = _both(_logits(4, spread=1e-4, vocab_size=10_000), sampled)
    assert ours == expected == [9000, 4096, 4096, 4095]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 5000])
def test_bitmasks_of_any_width_exclude_what_the_reference_excludes(vocab_size: int) -> None:
    allowed = [token for token in range(vocab_size) if token % 3 == 0]
    sampled = [_edited(1.0, allowed=allowed), _edited(1.0), _edited(0.0, allowed=allowed[-1:])]
    ours, expected = _both(_logits(3, vocab_size=vocab_size), sampled)
    assert ours == expected
    assert ours[0] % 3 == 0
    assert ours[2] == allowed[-1]


def test_rows_without_a_token_say_why() -> None:
    everything = [(token, BANNED, EVER) for token in range(VOCAB_SIZE)]
    logits = _logits(9)
    logits[0] = -torch.inf
    logits[1, 7] = torch.nan
    logits[5, 3] = torch.inf
    logits[8, 3] = torch.nan
    cases: dict[int, Sampled] = {
        NON_FINITE: _edited(0.0, edits=[(7, 1.0, EVER)]),  # and nothing was finite before
        NON_FINITE - 10: _edited(0.0, edits=[(7, BANNED, EVER)]),  # excludes the NaN
        NO_CANDIDATES: _edited(1.0, edits=everything),
        OFF_CONSTRAINT: _edited(1.0, allowed=[], has_constraint_failed=True),
        NO_CANDIDATES - 10: _edited(1.0, allowed=[]),
        NON_FINITE - 20: _edited(1.0, allowed=[4]),
        NOT_SAMPLED: _edited(0.0, offers=1, occurrences={}, allowed=[]),
        OFF_CONSTRAINT - 10: _edited(0.0, offers=1, allowed=[], has_constraint_failed=True),
        NON_FINITE - 30: _edited(0.0, offers=1),
    }
    ours, expected = _both(logits, list(cases.values()))
    assert ours == expected == [-(-code % 10) for code in cases]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by numpy, in the interpreter
def test_rows_whose_logits_overflow_have_no_token_unless_the_core_chooses_it() -> None:
    logits = _logits(7)
    logits[:6] = 3e38
    logits[1] = -3e38
    sampled = [
        _edited(0.5),
        _edited(0.5, top_k=5),
        _edited(1.0, occurrences={9: 1}, repetition_penalty=0.5),
        _edited(0.0, occurrences={9: 1}, frequency_penalty=-3e38),
        _edited(0.0, offers=1, occurrences={9: 1}, frequency_penalty=-3e38),
        _edited(0.0),
        _edited(1.0),
    ]
    ours, expected = _both(logits, sampled)
    assert ours == expected
    assert ours[:6] == [NON_FINITE] * 4 + [NOT_SAMPLED, 0]


def test_a_failure_stays_and_nothing_is_counted() -> None:
    failed = _edited(0.0, latest=OFF_CONSTRAINT, occurrences={})
    rows, tables = tables_of([failed, _edited(0.0, latest=7, occurrences={})], VOCAB_SIZE)
    tables = on_device(tables)
    logits = _logits(2)
    _, outcome = _by_kernels(logits, rows, tables)
    assert outcome == [OFF_CONSTRAINT, int(logits[1].argmax())]
    assert tables.latest.tolist() == [0, outcome[1], OFF_CONSTRAINT]
    assert tables.counts.sum(dim=1).tolist() == [0, 3, 0]


def test_sampled_tokens_are_counted() -> None:
    rows, tables = tables_of([_edited(0.0, occurrences={4: 1}, presence_penalty=0.1)], VOCAB_SIZE)
    tables = on_device(tables)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [4, 9]] = 5.0
    tokens = [_by_kernels(logits, rows, tables)[1][0] for _ in range(4)]
    assert tokens == [9, 4, 4, 4]
    assert tables.counts[1, [4, 9]].tolist() == [9, 3]


def test_a_bitmask_of_another_width_is_refused() -> None:
    rows, tables = tables_of([_edited(0.0)], 65)
    with pytest.raises(ValueError, match="expected 5 columns"):
        edit(torch.zeros(1, 100, device=DEVICE), on_device(rows), on_device(tables))


@pytest.mark.parametrize(("num_tokens", "max_blocks"), [(3, 4), (1500, 4), (2, 2100)])
def test_inputs_are_prepared_as_by_the_reference(num_tokens: int, max_blocks: int) -> None:
    draw = torch.Generator().manual_seed(num_tokens)
    seq_rows = torch.tensor([4, 0], dtype=torch.int32)
    inputs = StepInputs(
        token_ids=torch.randint(-5, 50, (num_tokens,), generator=draw, dtype=torch.int32),
        positions=torch.arange(num_tokens, dtype=torch.int32) % (16 * max_blocks),
        token_rows=seq_rows[torch.arange(num_tokens) % 2],
        seq_rows=seq_rows,
        context_lens=torch.tensor([0, 16 * max_blocks - 20], dtype=torch.int32),
    )
    latest, num_ahead = torch.tensor([33, 1, 1, 1, -2]), torch.tensor([3, 9, 9, 9, 0])
    block_tables = torch.randint(0, 99, (5, max_blocks + 3), generator=draw, dtype=torch.int32)
    block_tables[4] = -1
    drafts = torch.arange(100, 120).view(5, 4)
    tables = latest, num_ahead, drafts, block_tables
    ours = prepare(on_device(inputs), *(part.to(DEVICE) for part in tables), 16, max_blocks)
    expected = reference.prepare(inputs, *tables, 16, max_blocks)
    for name in expected._fields:
        assert getattr(ours, name).cpu().equal(getattr(expected, name)), name
    assert (expected.token_ids >= 0).all()
    is_draft = inputs.token_ids <= FIRST_DRAFT
    places = 4 * inputs.token_rows + FIRST_DRAFT - inputs.token_ids
    assert expected.token_ids[is_draft].equal(100 + places[is_draft].long())
    assert (expected.block_tables[0] == -1).all()
    assert (expected.block_tables[1] == -1).sum() == 1
    is_padding = inputs.token_rows == 4
    assert (expected.slot_mapping[is_padding] == -1).all()
    assert (expected.slot_mapping[~is_padding] >= 0).all()
    assert expected.positions.equal(inputs.positions + 3 * ~is_padding)
    of_states = prepare(on_device(inputs), *(part.to(DEVICE) for part in tables), 0, max_blocks)
    assert (of_states.block_tables[0] == -1).all(), "a row that pads a batch has no state"
    assert of_states.block_tables[1].cpu().equal(block_tables[0, :max_blocks])
    of_reference = reference.prepare(inputs, *tables, 0, max_blocks)
    for column, wanted in zip(of_states, of_reference, strict=True):
        assert column.cpu().equal(wanted)


@pytest.mark.parametrize("begin", [0, 1])
def test_drafts_are_accepted_as_by_the_reference(begin: int) -> None:
    """Rows without drafts, with all right, with a wrong one, with a failure at the first place and
    after a draft, one that offers candidates, and one whose drafts are on the device; tokens are
    counted where penalties are."""
    cases = [
        ([3], []),
        ([5, 6, 7], [5, 6]),
        ([5, 6, 7, 8], [5, 9, 7]),
        ([-2, 6], [6]),
        ([5, 5, -1, 8], [5, 5, 8]),
        ([NOT_SAMPLED], []),
        ([4, 4], [4]),
        # Drafts of the device: those of row 1 of its table, of which the third is wrong.
        ([5, 6, 8, 9], [FIRST_DRAFT, FIRST_DRAFT - 1, FIRST_DRAFT - 2]),
    ]
    counted = [_edited(0.0, occurrences={5: 1} if row % 3 else None) for row in range(len(cases))]
    _, tables = tables_of(counted, 40)
    tables.drafts[1, :3] = torch.tensor([5, 6, 7])
    outcome = torch.tensor([token for sampled, _ in cases for token in sampled])
    drafts = torch.tensor([token for _, proposed in cases for token in [*proposed, 30]])
    lengths = torch.tensor([len(sampled) for sampled, _ in cases])
    row_ids = torch.arange(len(cases), 0, -1)
    columns = outcome, drafts, row_ids, lengths.cumsum(0) - lengths, lengths - 1
    ours = on_device(_copy(tables))
    moved = [torch.cat([column[:begin], column]).to(DEVICE)[begin:] for column in columns]
    accepted = accept(*moved, ours)
    assert accepted.tolist() == [0, 2, 1, 0, 1, 0, 1, 2]
    before = tables.num_ahead.clone()
    assert reference.accept(*columns, tables).equal(accepted.cpu())
    assert tables.latest[row_ids].tolist() == [3, 7, 6, -2, 5, 0, 4, 8]
    assert (tables.num_ahead - before)[row_ids].equal(accepted.cpu())
    for name in tables.__slots__:
        assert getattr(ours, name).cpu().equal(getattr(tables, name)), name
