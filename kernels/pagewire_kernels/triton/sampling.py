"""Bitmasks, sampling and log probabilities on a GPU.

What bounds them: the rows of logits are read over and over, `vocab_size * 4` bytes a row and pass.
A greedy row takes one pass, one without filters four, one with top-k or top-p as many more as it
takes until the tokens in question are few, at most 32. A row is one program's, so that a batch with
fewer rows than the device has processors is bound by what one processor can read. Memory beside the
logits: 16 KiB a row.
"""

import torch
import triton
from torch import Tensor

from pagewire_kernels.batch import SamplingMetadata
from pagewire_kernels.triton import sampling_kernels
from pagewire_kernels.triton.checks import FLOATS, expect, expect_dtype, expect_rows

CAPACITY = 2048
"""Tokens that are copied out to find the cut among."""

_TILE = 4096
_NUM_WARPS = 16
"""A row alone waits for memory once a tile, so tiles are as large as registers allow."""


def sample(logits: Tensor, metadata: SamplingMetadata, *, capacity: int = CAPACITY) -> Tensor:
    """One token per row; as `reference.sample`, up to the rounding of sums of probabilities."""
    num_rows, vocab_size = _check_logits(logits)
    m = metadata
    for name, column, dtype in (
        ("temperature", m.temperature, torch.float32),
        ("top_k", m.top_k, torch.int32),
        ("top_p", m.top_p, torch.float64),
        ("min_p", m.min_p, torch.float64),
    ):
        expect_dtype(name, column, dtype)
        expect_rows(name, column, num_rows)
    _check_draws(m.seeds, m.choice_indices, m.positions)
    expect_rows("seeds", m.seeds, num_rows)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    candidates = torch.empty((num_rows, capacity), dtype=torch.float32, device=logits.device)
    if num_rows:
        sampling_kernels.sample[(num_rows,)](
            tokens,
            logits,
            candidates,
            torch.empty_like(candidates, dtype=torch.int32),
            m.temperature,
            m.top_k,
            m.top_p,
            m.min_p,
            m.seeds,
            m.choice_indices,
            m.positions,
            vocab_size,
            logits.stride(0),
            CAPACITY=capacity,
            TILE=_tile(vocab_size),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return tokens


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Minus infinity where a row's bit is 0, in place; as `reference.apply_bitmask`.

    Reads the mask, a thirty-second of a row's size, and writes what is excluded: logits are not
    read. Most are, so it is bound by writing one row.
    """
    _, vocab_size = _check_logits(logits)
    expect_dtype("rows", rows, torch.int64)
    expect_rows("rows", rows, None)
    expect_dtype("bitmask", bitmask, torch.int32)
    expect_rows("bitmask", bitmask, len(rows), None)
    num_words = triton.cdiv(vocab_size, 32)
    expect(bitmask.shape[1] == num_words, f"bitmask: expected {num_words} columns")
    if len(rows):
        tile = _tile(vocab_size)
        sampling_kernels.apply_bitmask[(len(rows), triton.cdiv(vocab_size, tile))](
            logits,
            rows,
            bitmask,
            vocab_size,
            logits.stride(0),
            bitmask.stride(0),
            TILE=tile,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log softmax at some tokens, and the rank of the first; as `reference.gather_logprobs`.

    Two passes over the logits and nothing of their size written.
    """
    num_rows, vocab_size = _check_logits(logits)
    expect_dtype("token_ids", token_ids, torch.int64)
    expect_rows("token_ids", token_ids, num_rows, None)
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


def _check_logits(logits: Tensor) -> tuple[int, int]:
    expect_dtype("logits", logits, *FLOATS)
    expect_rows("logits", logits, None, None)
    num_rows, vocab_size = logits.shape
    expect(vocab_size > 0, "logits: expected at least one column")
    return num_rows, vocab_size


def _check_draws(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> None:
    expect_dtype("seeds", seeds, torch.int64)
    expect_rows("seeds", seeds, None)
    for name, column in (("choice_indices", choice_indices), ("positions", positions)):
        expect_dtype(name, column, torch.int32)
        expect_rows(name, column, len(seeds))
