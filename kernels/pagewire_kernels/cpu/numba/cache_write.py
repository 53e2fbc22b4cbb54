"""The kernel that puts new keys and values into their slots."""

from typing import Any

import numba

from pagewire_kernels.cpu.numba import simd

ROWS_PER_ITEM = 64

(
    KEY,  # addresses; a row's heads lie one after the other
    VALUE,
    KEY_ROW_BYTES,
    VALUE_ROW_BYTES,
    KEY_CACHE,  # addresses
    VALUE_CACHE,
    BLOCK_BYTES,
    TOKEN_BYTES,
    BLOCK_SIZE,
    SLOT_MAPPING,  # address of int64 [num_rows]
    NUM_ROWS,
    COPIED_BYTES,  # of one row, even
    NUM_ITEMS,
    NEXT_ITEM,  # address of an int64 counter
    NUM_FIELDS,
) = range(15)


@numba.njit
def write_kv(task: Any) -> None:
    """Take batches of rows until none is left."""
    while True:
        item = simd.fetch_add(task[NEXT_ITEM], 1)
        if item >= task[NUM_ITEMS]:
            return
        end = min(task[NUM_ROWS], (item + 1) * ROWS_PER_ITEM)
        for row in range(item * ROWS_PER_ITEM, end):
            slot = simd.load_int64(task[SLOT_MAPPING] + 8 * row)
            if slot >= 0:
                _write_row(task, row, slot)


@numba.njit
def _write_row(task: Any, row: int, slot: int) -> None:
    block, offset = slot // task[BLOCK_SIZE], slot % task[BLOCK_SIZE]
    at = block * task[BLOCK_BYTES] + offset * task[TOKEN_BYTES]
    size = task[COPIED_BYTES]
    simd.copy_bytes(task[KEY_CACHE] + at, task[KEY] + row * task[KEY_ROW_BYTES], size)
    simd.copy_bytes(task[VALUE_CACHE] + at, task[VALUE] + row * task[VALUE_ROW_BYTES], size)
