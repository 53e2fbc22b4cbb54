"""A step's inputs, edits of logits, sampling and log probabilities on a GPU.

Sampling is bound by reading logits repeatedly, `vocab_size * 4` bytes per row and pass. The first
pass has a program per tile: it edits the logits, for which penalties also read the counts of
tokens, as many bytes as the logits, and finds the largest one. That is all for a greedy row; a row
without filters takes three more passes, and top-k or top-p up to 32 more, until few tokens are
left. In these each row has one program, so that a batch with fewer rows than the device has
multiprocessors is bound by the bandwidth of one multiprocessor. Scratch memory: 16 KiB per row.
"""

import torch
import triton
from torch import Tensor

from pagewire_kernels.batch import (
    PreparedInputs,
    SamplingParam,
    SamplingRows,
    SamplingTables,
    StepInputs,
    mask_width,
)
from pagewire_kernels.interface import FLOATS
from pagewire_kernels.triton import sampling_kernels
from pagewire_kernels.triton.checks import expect, expect_dtype, expect_rows, expect_tensors

CAPACITY = 2048
"""Maximum number of tokens that are copied to scratch memory to find the cut."""

_TILE = 4096
_NUM_WARPS = 16
"""A program waits for memory once per tile, so tiles are as large as registers allow."""

_TILE_EDITS = 128
_TILE_INPUTS = 1024


def prepare(
    inputs: StepInputs,
    latest: Tensor,
    num_ahead: Tensor,
    drafts: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_blocks: int,
) -> PreparedInputs:
    """Prepare a model's inputs in one launch; as `reference.prepare`."""
    num_tokens, num_seqs, device = len(inputs.token_ids), len(inputs.seq_rows), latest.device
    for name, column in inputs._asdict().items():
        of_seqs = name in ("seq_rows", "context_lens")
        expect_dtype(name, column, torch.int32)
        expect_rows(name, column, num_seqs if of_seqs else num_tokens)
    tokens = torch.empty((3, num_tokens), dtype=torch.int64, device=device)
    lengths = torch.empty(num_seqs, dtype=torch.int32, device=device)
    tables = torch.empty((num_seqs, max_blocks), dtype=torch.int32, device=device)
    prepared = PreparedInputs(tokens[0], tokens[1], tokens[2], lengths, tables)
    num_programs = max(num_seqs, triton.cdiv(num_tokens, _TILE_INPUTS))
    sampling_kernels.prepare[(num_programs, triton.cdiv(max_blocks, _TILE_INPUTS))](
        *inputs,
        latest,
        num_ahead,
        drafts,
        block_tables,
        *prepared,
        num_tokens,
        num_seqs,
        max_blocks,
        block_tables.stride(0),
        drafts.stride(0),
        BLOCK_SIZE=block_size,
        TILE=_TILE_INPUTS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return prepared


def edit(logits: Tensor, rows: SamplingRows, tables: SamplingTables) -> Tensor:
    """Edit logits in place; as `reference.edit`. Returns int32 [3, n, tiles of a row]."""
    num_rows, vocab_size = _check(logits, rows)
    tile = _tile(vocab_size)
    num_tiles = triton.cdiv(vocab_size, tile)
    tiles = torch.empty((3, num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    if num_rows:
        sampling_kernels.edit[(num_rows, num_tiles)](
            logits,
            tiles,
            *rows,
            tables.params,
            tables.num_ahead,
            tables.counts,
            tables.edit_tokens,
            tables.edit_values,
            tables.edit_ends,
            vocab_size,
            logits.stride(0),
            rows.bitmask.stride(0),
            NUM_PARAMS=len(SamplingParam),
            MAX_EDITS=tables.edit_tokens.shape[1],
            NUM_TILES=num_tiles,
            TILE=tile,
            TILE_EDITS=_TILE_EDITS,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return tiles


def sample(
    logits: Tensor,
    tiles: Tensor,
    rows: SamplingRows,
    tables: SamplingTables,
    outcome: Tensor,
    *,
    capacity: int = CAPACITY,
) -> None:
    """Sample; as `reference.sample`, up to the rounding of sums of probabilities.

    capacity: see `CAPACITY`.
    """
    num_rows, vocab_size = _check(logits, rows)
    expect_tensors(("outcome", outcome, (torch.int64,), (num_rows,)))
    candidates = torch.empty((num_rows, capacity), dtype=torch.float32, device=logits.device)
    if num_rows:
        sampling_kernels.sample[(num_rows,)](
            outcome,
            logits,
            tiles,
            candidates,
            torch.empty_like(candidates, dtype=torch.int32),
            *rows,
            tables.params,
            tables.latest,
            tables.num_ahead,
            tables.counts,
            vocab_size,
            logits.stride(0),
            rows.bitmask.stride(0),
            NUM_PARAMS=len(SamplingParam),
            NUM_TILES=tiles.shape[2],
            CAPACITY=capacity,
            TILE=_tile(vocab_size),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def accept(
    outcome: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    starts: Tensor,
    num_drafts: Tensor,
    tables: SamplingTables,
) -> Tensor:
    """Accept drafts in one launch; as `reference.accept`."""
    num_places, num_rows = len(outcome), len(row_ids)
    for name, column in (("outcome", outcome), ("drafts", drafts)):
        expect_tensors((name, column, (torch.int64,), (num_places,)))
    for name, column in (("row_ids", row_ids), ("starts", starts), ("num_drafts", num_drafts)):
        expect_tensors((name, column, (torch.int64,), (num_rows,)))
    accepted = torch.empty(num_rows, dtype=torch.int32, device=outcome.device)
    if num_rows:
        sampling_kernels.accept[(num_rows,)](
            accepted,
            outcome,
            drafts,
            row_ids,
            starts,
            num_drafts,
            tables.params,
            tables.latest,
            tables.num_ahead,
            tables.drafts,
            tables.counts,
            tables.counts.shape[1],
            tables.drafts.stride(0),
            NUM_PARAMS=len(SamplingParam),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return accepted


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log softmax of some tokens, and the rank of the first; as `reference.gather_logprobs`.

    Takes two passes over the logits, and writes nothing of their size.
    """
    num_rows, vocab_size = _check_logits(logits, *FLOATS)
    expect_tensors(("token_ids", token_ids, (torch.int64,), (num_rows, None)))
    num_tokens = token_ids.shape[1]
    expect(num_tokens > 0, "token_ids: expected at least one column")
    output = torch.empty((num_rows, num_tokens), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        sampling_kernels.logprobs[(num_rows,)](
            output,
            ranks,
            logits,
            token_ids.contiguous(),
            vocab_size,
            num_tokens,
            logits.stride(0),
            TILE=_tile(vocab_size),
            TILE_TOKENS=triton.next_power_of_2(num_tokens),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return output, ranks


def _tile(vocab_size: int) -> int:
    return min(_TILE, triton.next_power_of_2(vocab_size))


def _check_logits(logits: Tensor, *dtypes: torch.dtype) -> tuple[int, int]:
    expect_tensors(("logits", logits, dtypes, (None, None)))
    num_rows, vocab_size = logits.shape
    expect(vocab_size > 0, "logits: expected at least one column")
    return num_rows, vocab_size


def _check(logits: Tensor, rows: SamplingRows) -> tuple[int, int]:
    num_rows, vocab_size = _check_logits(logits, torch.float32)
    for name, column in zip(rows._fields[:3], rows, strict=False):
        expect_dtype(name, column, torch.int32)
        expect_rows(name, column, num_rows)
    expect_dtype("bitmask", rows.bitmask, torch.int32)
    num_words = mask_width(vocab_size)
    expect(rows.bitmask.shape[1] == num_words, f"bitmask: expected {num_words} columns")
    return num_rows, vocab_size
