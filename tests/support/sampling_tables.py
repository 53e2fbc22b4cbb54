"""Sampling tables with a row for each row of a batch, for tests of the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire_kernels.batch import (
    COUNT_OCCURS,
    COUNT_ONE_OUTPUT,
    SamplingParam,
    SamplingRows,
    SamplingTables,
)

EVER = 2**31 - 1
REALS = (
    SamplingParam.TEMPERATURE,
    SamplingParam.TOP_P,
    SamplingParam.MIN_P,
    SamplingParam.REPETITION_PENALTY,
    SamplingParam.FREQUENCY_PENALTY,
    SamplingParam.PRESENCE_PENALTY,
)
NEUTRAL = {
    SamplingParam.TEMPERATURE: 1.0,
    SamplingParam.TOP_P: 1.0,
    SamplingParam.REPETITION_PENALTY: 1.0,
}


@dataclass(frozen=True)
class Sampled:
    """One row: its parameters by name, and the rest of what is known of it."""

    params: dict[str, float]
    edits: Sequence[tuple[int, float, int]] = ()
    """(token, number added, output position from which on it does not apply)."""
    occurrences: dict[int, int] | None = None
    """Tokens that occur, by how often they do in the output; None: no penalties."""
    allowed: Sequence[int] | None = None
    """Tokens that the bitmask allows; None: no bitmask."""
    has_constraint_failed: bool = False
    position: int = 0
    latest: int = 0


def tables_of(sampled: Sequence[Sampled], vocab_size: int) -> tuple[SamplingRows, SamplingTables]:
    """Rows in falling order of the tables, with one row of the tables that nobody uses."""
    count = len(sampled)
    tables = SamplingTables(
        params=torch.zeros((count + 1, len(SamplingParam)), dtype=torch.int64),
        latest=torch.zeros(count + 1, dtype=torch.int64),
        num_ahead=torch.arange(count + 1) % 3,
        drafts=torch.arange(5 * (count + 1)).view(count + 1, 5),
        counts=torch.zeros((count + 1, vocab_size), dtype=torch.int32),
        edit_tokens=torch.zeros((count + 1, 300), dtype=torch.int32),
        edit_values=torch.zeros((count + 1, 300)),
        edit_ends=torch.zeros((count + 1, 300), dtype=torch.int32),
    )
    masks: list[Tensor] = [torch.zeros(-(-vocab_size // 32) + 1, dtype=torch.int32)]
    mask_rows = []
    for index, row in enumerate(sampled):
        row_id = count - index
        numbers = NEUTRAL | {SamplingParam[name.upper()]: x for name, x in row.params.items()}
        numbers[SamplingParam.NUM_EDITS] = len(row.edits)
        numbers[SamplingParam.IS_PENALIZED] = row.occurrences is not None
        for param, number in numbers.items():
            column = tables.params[row_id : row_id + 1, param]
            if param in REALS:
                column.view(torch.float64)[0] = number
            else:
                column[0] = int(number)
        tables.latest[row_id] = row.latest
        ordered = sorted(row.edits, key=lambda edit: edit[1] == -torch.inf)
        for place, (token, value, end) in enumerate(ordered):
            tables.edit_tokens[row_id, place] = token
            tables.edit_values[row_id, place] = value
            tables.edit_ends[row_id, place] = end
        for token, times in (row.occurrences or {}).items():
            tables.counts[row_id, token] = times * COUNT_ONE_OUTPUT + COUNT_OCCURS
        mask_rows.append(-1)
        if row.allowed is not None or row.has_constraint_failed:
            mask_rows[-1] = len(masks)
            masks.append(_bits(row.allowed or (), vocab_size))
            masks[-1][-1] = row.has_constraint_failed
    row_ids = torch.arange(count, 0, -1, dtype=torch.int32)
    positions = torch.tensor([row.position for row in sampled], dtype=torch.int32)
    rows = SamplingRows(
        row_ids=row_ids,
        positions=positions - tables.num_ahead[row_ids.long()].int(),
        mask_rows=torch.tensor(mask_rows, dtype=torch.int32),
        bitmask=torch.stack(masks),
    )
    return rows, tables


def _bits(tokens: Sequence[int], vocab_size: int) -> Tensor:
    words = [0] * (-(-vocab_size // 32) + 1)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    signed: list[Any] = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32)
