"""The attention kernel: online softmax over a sequence's blocks, in one fixed order per row.

A work item is a tile of consecutive query tokens of one sequence, and one KV head or all of them;
its rows are the tile's tokens times the query heads that share a KV head. The item walks over the
sequence's keys in steps of up to sixteen within a block. Each step's keys and values are copied to
a small dense piece of memory as float32, since heads that lie a power of two apart would push each
other out of the cache. Then each row goes through (Milakov and Gimelshein 2018)

    score   = q . k                    a fused multiply-add chain per lane, then a tree over lanes
    maximum = max(maximum, scores)
    sum     = sum * e^(old maximum - maximum) + sum of e^(score - maximum)
    output  = output * e^(old maximum - maximum) + e^(score - maximum) * v, key by key

Steps are counted from the sequence's start, never from the tile's, and a row skips the steps of
which it sees nothing, so what happens to a row does not depend on the tile it is in.

Everything comes in one array of int64, whose fields are numbered below.
"""

from typing import Any

import numba

from pagewire_kernels.cpu.numba import simd
from pagewire_kernels.cpu.numba.simd import LANES

MAX_ROWS = 64
"""Rows of one KV head in a work item at most, unless the head has more for a single token."""

VECTOR_BYTES = 4 * LANES
_CHUNKS_BYTES = simd.CHUNKS * VECTOR_BYTES

_ROW_VECTORS = 4
"""A row's weights, maximum, sum, and the factor by which it last shrank."""

_MINUS_INFINITY = float("-inf")

njit = numba.njit(error_model="numpy")  # no check for divisions by zero

(
    QUERY,  # address; row strides in bytes follow
    QUERY_TOKEN_BYTES,
    QUERY_HEAD_BYTES,
    OUTPUT,  # address; [num_tokens, num_heads, head_dim], contiguous
    KEY_CACHE,  # address
    VALUE_CACHE,  # address; the strides below, in bytes, hold for both
    BLOCK_BYTES,
    TOKEN_BYTES,
    HEAD_BYTES,
    ELEMENT_BYTES,
    QUERY_START,  # addresses of int32 arrays
    CONTEXT_LENS,
    BLOCK_TABLES,
    TABLE_WIDTH,
    TILE_START,  # address of int32 [num_seqs + 1]: tiles before each sequence
    NUM_SEQS,
    NUM_KV_HEADS,
    GROUP,  # query heads per KV head
    HEAD_DIM,
    BLOCK_SIZE,
    TILE_TOKENS,
    ITEM_HEADS,  # KV heads of a work item; a divisor of NUM_KV_HEADS
    WINDOW,  # 0 without
    SINKS,  # address of float32 [num_heads]; 0 without
    SLOPES,  # address of ALiBi's float32 [num_heads]; 0 without
    FLOATS,  # address of float32: 0 to 15, then scale, and soft cap (0 without)
    NUM_ITEMS,
    NEXT_ITEM,  # addresses of int64 counters
    NEXT_THREAD,
    SCRATCH,  # address, aligned to VECTOR_BYTES
    SCRATCH_BYTES,  # per thread
    NUM_FIELDS,
) = range(32)

SCALE_AT = 4 * LANES
CAP_AT = SCALE_AT + 4
NUM_FLOATS = LANES + 2


def scratch_bytes(head_dim: int, rows: int) -> int:
    """Scratch memory one thread needs for work items of up to `num_rows` rows."""
    head_bytes = -(-head_dim // LANES) * VECTOR_BYTES
    return 2 * LANES * head_bytes + rows * (2 * head_bytes + _ROW_VECTORS * VECTOR_BYTES)


@njit
def attend(task: Any, element: Any) -> None:
    """Take work items until none is left. `element` marks the cache's dtype."""
    thread = simd.fetch_add(task[NEXT_THREAD], 1)
    scratch = task[SCRATCH] + thread * task[SCRATCH_BYTES]
    while True:
        taken = simd.fetch_add(task[NEXT_ITEM], 1)
        if taken >= task[NUM_ITEMS]:
            return
        # A sequence's last tiles have the most keys: they go first.
        _attend_item(task, task[NUM_ITEMS] - 1 - taken, scratch, element)


@njit
def _attend_item(task: Any, item: int, scratch: int, element: Any) -> None:
    """One work item: a decode's heads together, so that a block is read in one go; a prefill's one
    after the other, so that its rows stay in the cache."""
    item_heads = task[ITEM_HEADS]
    parts = task[NUM_KV_HEADS] // item_heads
    tile, first_head = item // parts, item % parts * item_heads
    seq = _sequence_of(task, tile)
    tile_in_seq = tile - simd.load_int32(task[TILE_START] + 4 * seq)
    first_token = simd.load_int32(task[QUERY_START] + 4 * seq) + tile_in_seq * task[TILE_TOKENS]
    tokens_left = simd.load_int32(task[QUERY_START] + 4 * seq + 4) - first_token
    num_tokens = min(task[TILE_TOKENS], tokens_left)
    heads_at_once = item_heads if num_tokens == 1 else 1
    for head in range(first_head, first_head + item_heads, heads_at_once):
        _load_rows(task, first_token, num_tokens, head, heads_at_once, scratch, element)
        position = simd.load_int32(task[CONTEXT_LENS] + 4 * seq) - tokens_left
        _walk_keys(task, seq, position, num_tokens, head, heads_at_once, scratch, element)
        _store_rows(task, first_token, num_tokens, head, heads_at_once, scratch, element)


@njit
def _sequence_of(task: Any, tile: int) -> int:
    """The sequence that a tile belongs to: the last one with no more tiles than that before it."""
    low, high = 0, task[NUM_SEQS]
    while high - low > 1:
        middle = (low + high) // 2
        if simd.load_int32(task[TILE_START] + 4 * middle) <= tile:
            low = middle
        else:
            high = middle
    return low


# A head is handled in chunks of sixteen. In the cache the last one ends where the head ends, and so
# may overlap the one before; in the query those lanes are zero, and both outputs are the same.
#
# Scratch: sixteen keys, sixteen values, then for each row its query, output and the vectors
# above. Rows are numbered by KV head, then token, then query head within the KV head's group.


@njit
def _head_bytes(task: Any) -> int:
    return (task[HEAD_DIM] + LANES - 1) // LANES * VECTOR_BYTES


@njit
def _chunk_bytes(task: Any, chunk: int) -> int:
    """Where a chunk begins in a head in the cache."""
    return min(chunk * LANES, task[HEAD_DIM] - LANES) * task[ELEMENT_BYTES]


@njit
def _query_of(task: Any, scratch: int, row: int) -> int:
    """Address of a row's query; its output and vectors come after it."""
    head_bytes = _head_bytes(task)
    return scratch + 2 * LANES * head_bytes + row * (2 * head_bytes + _ROW_VECTORS * VECTOR_BYTES)


@njit
def _load_rows(
    task: Any,
    first_token: int,
    num_tokens: int,
    first_head: int,
    num_heads: int,
    scratch: int,
    element: Any,
) -> None:
    """Scaled queries as float32, and empty sums."""
    group, head_bytes = task[GROUP], _head_bytes(task)
    scale = simd.broadcast(simd.load_scalar(task[FLOATS] + SCALE_AT))
    for row in range(num_heads * num_tokens * group):
        token = first_token + row % (num_tokens * group) // group
        head = (first_head + row // (num_tokens * group)) * group + row % group
        source = task[QUERY] + token * task[QUERY_TOKEN_BYTES] + head * task[QUERY_HEAD_BYTES]
        query = _query_of(task, scratch, row)
        for chunk in range(head_bytes // VECTOR_BYTES):
            values = simd.multiply(simd.load(element, source + _chunk_bytes(task, chunk)), scale)
            overlap = max(0, (chunk + 1) * LANES - task[HEAD_DIM])
            values = simd.keep_lanes(values, overlap, LANES, numba.float32(0.0))
            at = query + chunk * VECTOR_BYTES
            simd.store(simd.float32(), at, values)
            simd.store(simd.float32(), at + head_bytes, simd.zeros())
        maximum = query + 2 * head_bytes + VECTOR_BYTES
        simd.store(simd.float32(), maximum, simd.broadcast(numba.float32(_MINUS_INFINITY)))
        simd.store(simd.float32(), maximum + VECTOR_BYTES, simd.zeros())


@njit
def _walk_keys(
    task: Any,
    seq: int,
    position: int,
    num_tokens: int,
    first_head: int,
    num_heads: int,
    scratch: int,
    element: Any,
) -> None:
    """Take all rows over all keys that any of them sees. `position` is that of the first token."""
    block_size, window = task[BLOCK_SIZE], task[WINDOW]
    end_key = position + num_tokens
    first_key = max(0, position - window + 1) if window > 0 else 0
    table = task[BLOCK_TABLES] + 4 * seq * task[TABLE_WIDTH]
    for block in range(first_key // block_size, (end_key + block_size - 1) // block_size):
        block_at = simd.load_int32(table + 4 * block) * task[BLOCK_BYTES]
        block_end = min(end_key, (block + 1) * block_size)
        for key in range(block * block_size, block_end, LANES):
            at = block_at + (key - block * block_size) * task[TOKEN_BYTES]
            num_keys = min(LANES, block_end - key)
            for head in range(num_heads):
                head_at = at + (first_head + head) * task[HEAD_BYTES]
                _copy_step(task, head_at, num_keys, scratch, element)
                first_query_head = (first_head + head) * task[GROUP]
                _take_step(
                    task, position - key, num_keys, head, first_query_head, num_tokens, scratch
                )


@njit
def _copy_step(task: Any, at: int, num_keys: int, scratch: int, element: Any) -> None:
    """Keys and values of one step and head, as dense float32. Values of keys there are not yet are
    zero, since what stands in the cache may be anything, and 0 * NaN is NaN."""
    head_bytes, stride = _head_bytes(task), task[TOKEN_BYTES]
    keys, values = task[KEY_CACHE] + at, task[VALUE_CACHE] + at
    for j in range(num_keys):
        for chunk in range(head_bytes // VECTOR_BYTES):
            source = j * stride + _chunk_bytes(task, chunk)
            target = scratch + j * head_bytes + chunk * VECTOR_BYTES
            simd.store(simd.float32(), target, simd.load(element, keys + source))
            target += LANES * head_bytes
            simd.store(simd.float32(), target, simd.load(element, values + source))
    for at in range((LANES + num_keys) * head_bytes, 2 * LANES * head_bytes, VECTOR_BYTES):
        simd.store(simd.float32(), scratch + at, simd.zeros())


@njit
def _take_step(
    task: Any,
    position: int,
    num_keys: int,
    head: int,
    first_query_head: int,
    num_tokens: int,
    scratch: int,
) -> None:
    """Take a head's rows over the keys that were copied. `position` is that of the first token,
    counted from the first of the keys; `head` is counted within the item.

    Three passes instead of one: what a row must wait for, another row's work then fills.
    """
    group = task[GROUP]
    first_row = head * num_tokens * group
    for token in range(num_tokens):
        first, end = _seen(task, position + token, num_keys)
        if first < end:
            for row in range(first_row + token * group, first_row + (token + 1) * group):
                _score(task, row, scratch)
    for token in range(num_tokens):
        first, end = _seen(task, position + token, num_keys)
        if first < end:
            for i in range(group):
                row = first_row + token * group + i
                _weigh(task, row, first_query_head + i, position + token, first, end, scratch)
    for token in range(num_tokens):
        first, end = _seen(task, position + token, num_keys)
        if first < end:
            for row in range(first_row + token * group, first_row + (token + 1) * group):
                _add_values(task, row, scratch)


@njit
def _seen(task: Any, position: int, num_keys: int) -> tuple[int, int]:
    """The first of a step's keys that a row sees, and the one after the last."""
    window = task[WINDOW]
    first = max(0, position - window + 1) if window > 0 else 0
    return first, min(num_keys, position + 1)


@njit
def _score(task: Any, row: int, scratch: int) -> None:
    """A row's products with all sixteen keys; some of them may be of no meaning."""
    head_bytes = _head_bytes(task)
    query = _query_of(task, scratch, row)
    products = simd.products()
    for at in range(0, head_bytes, VECTOR_BYTES):
        part = simd.load(simd.float32(), query + at)
        products = simd.tile_multiply_add(products, part, scratch + at, head_bytes)
    simd.store(simd.float32(), query + 2 * head_bytes, simd.sum_products(products))


@njit
def _weigh(
    task: Any, row: int, head: int, position: int, first: int, end: int, scratch: int
) -> None:
    """Turn a row's scores of keys `first` to `end - 1` into weights, the others into zeros; update
    its maximum and sum, and leave the factor by which what was summed before shrinks. `head` is the
    row's query head, `position` its own, counted from the first of the keys."""
    weights = _query_of(task, scratch, row) + 2 * _head_bytes(task)
    maximum, total = weights + VECTOR_BYTES, weights + 2 * VECTOR_BYTES
    score = simd.load(simd.float32(), weights)
    cap = simd.load_scalar(task[FLOATS] + CAP_AT)
    if cap > 0:
        score = _cap(score, cap)
    if task[SLOPES] != 0:
        distance = simd.subtract(
            simd.load(simd.float32(), task[FLOATS]), simd.broadcast(numba.float32(position))
        )
        slope = simd.broadcast(simd.load_scalar(task[SLOPES] + 4 * head))
        score = simd.multiply_add(slope, distance, score)
    score = simd.keep_lanes(score, first, end, numba.float32(_MINUS_INFINITY))
    before = simd.load(simd.float32(), maximum)
    after = simd.broadcast(max(simd.first_lane(before), simd.max_lanes(score)))
    shrink = simd.exp(simd.subtract(before, after))
    weight = simd.exp(simd.subtract(score, after))
    weight = simd.keep_lanes(weight, first, end, numba.float32(0.0))
    step_sum = simd.broadcast(simd.sum_lanes(weight))
    new_total = simd.multiply_add(simd.load(simd.float32(), total), shrink, step_sum)
    simd.store(simd.float32(), weights, weight)
    simd.store(simd.float32(), maximum, after)
    simd.store(simd.float32(), total, new_total)
    simd.store(simd.float32(), total + VECTOR_BYTES, shrink)


@njit
def _add_values(task: Any, row: int, scratch: int) -> None:
    """Shrink a row's output and add all sixteen weighted values; unseen ones have no weight."""
    head_bytes = _head_bytes(task)
    output = _query_of(task, scratch, row) + head_bytes
    weights, values = output + head_bytes, scratch + LANES * head_bytes
    shrink = simd.load(simd.float32(), weights + 3 * VECTOR_BYTES)
    done = head_bytes // _CHUNKS_BYTES * _CHUNKS_BYTES
    for at in range(0, done, _CHUNKS_BYTES):
        total = simd.load_chunks(output + at, shrink)
        for j in range(LANES):
            weight = simd.broadcast(simd.load_scalar(weights + 4 * j))
            value = values + j * head_bytes + at
            total = simd.tile_multiply_add(total, weight, value, VECTOR_BYTES)
        simd.store_chunks(output + at, total)
    for at in range(done, head_bytes, VECTOR_BYTES):
        rest = simd.multiply(simd.load(simd.float32(), output + at), shrink)
        for j in range(LANES):
            weight = simd.broadcast(simd.load_scalar(weights + 4 * j))
            value = simd.load(simd.float32(), values + j * head_bytes + at)
            rest = simd.multiply_add(weight, value, rest)
        simd.store(simd.float32(), output + at, rest)


@njit
def _cap(score: Any, cap: float) -> Any:
    """cap * tanh(score / cap), with tanh(x) = 1 - 2 / (e^2x + 1)."""
    caps, one = simd.broadcast(cap), simd.broadcast(numba.float32(1.0))
    two = simd.broadcast(numba.float32(2.0))
    power = simd.exp(simd.multiply(two, simd.divide(score, caps)))
    return simd.multiply(caps, simd.subtract(one, simd.divide(two, simd.add(power, one))))


@njit
def _store_rows(
    task: Any,
    first_token: int,
    num_tokens: int,
    first_head: int,
    num_heads: int,
    scratch: int,
    element: Any,
) -> None:
    """Divide each row by its sum, its head's sink included, and write it out."""
    group, head_bytes = task[GROUP], _head_bytes(task)
    token_bytes = task[NUM_KV_HEADS] * group * task[HEAD_DIM] * task[ELEMENT_BYTES]
    for row in range(num_heads * num_tokens * group):
        token = first_token + row % (num_tokens * group) // group
        head = (first_head + row // (num_tokens * group)) * group + row % group
        output = _query_of(task, scratch, row) + head_bytes
        maximum = output + head_bytes + VECTOR_BYTES
        total = simd.load(simd.float32(), maximum + VECTOR_BYTES)
        if task[SINKS] != 0:
            sink = simd.broadcast(simd.load_scalar(task[SINKS] + 4 * head))
            sink = simd.subtract(sink, simd.load(simd.float32(), maximum))
            total = simd.add(total, simd.exp(sink))
        target = task[OUTPUT] + token * token_bytes + head * task[HEAD_DIM] * task[ELEMENT_BYTES]
        for chunk in range(head_bytes // VECTOR_BYTES):
            values = simd.load(simd.float32(), output + chunk * VECTOR_BYTES)
            simd.store(element, target + _chunk_bytes(task, chunk), simd.divide(values, total))
