"""The Triton kernels of paged attention; `attention.py` launches them.

One program computes the attention of a tile of query rows over keys in order of position, with a
running maximum and sum (online softmax: Milakov and Gimelshein 2018; Dao et al. 2022). A tile has
the query heads that share a KV head, for one or more tokens of one sequence, so that keys and
values are read once for all of them (Ainslie et al. 2023). Scores are kept in base two.

If a step has too few tiles to occupy the device, the context is divided into *splits*, each
computed by a program of its own into float32 partial results that `reduce_splits` merges in order
(Flash-Decoding, Dao et al. 2023). Decodes are split by length: `plan_splits` divides all contexts
into splits of equal size, so that one long context among many is shared by many programs, as in
stream-K (Osama et al. 2023). A program that computes all splits of its tile merges them in the same
order, so that with a fixed split size both give the same bits. Splits and tiles of keys start at
multiples of their size, not at the window or tile of a row: a tile of keys that a row does not see
leaves its sums unchanged, to the bit.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of(query_start, num_seqs, index, TILE_TOKENS: tl.constexpr):
    """Return the last sequence whose first tile is not after tile `index`.

    The first tile of sequence `i` is `(query_start[i] - query_start[0]) // TILE_TOKENS + i`, which
    reserves enough tiles for each sequence without the lengths of the others (as in vLLM's unified
    attention).
    """
    low = 0
    high = num_seqs
    first_row = tl.load(query_start)
    while high - low > 1:
        middle = (low + high) // 2
        row = tl.load(query_start + middle) - first_row
        is_before = row // TILE_TOKENS + middle <= index
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def sequence_of_row(starts, num_seqs, row):
    """Return the sequence of flattened row `row`: the last one that starts at or before it."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) <= row
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _finite(maximum):
    """The number to subtract from scores: the maximum, or zero if no key was visible."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _scores(tile, keys, key_at, numbers):
    """Scores in base two; minus infinity for keys that a row does not see. See `_attend_span`."""
    query, row_at, slopes = tile
    scale, soft_cap, window = numbers
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if soft_cap is not None:
        scores = _tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    distance = row_at[:, None] - key_at[None, :]
    if slopes is not None:
        scores -= (slopes * LOG2_E)[:, None] * distance
    is_visible = distance >= 0
    if window is not None:
        is_visible = is_visible & (distance < window)
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def _attend_span(
    tile,
    begin,
    end,
    first_key,
    numbers,
    cache,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Attention of a tile over keys `begin` (a multiple of TILE_KEYS) to `end`.

    tile: queries, their positions, and slopes of their heads or None; numbers: scale, soft cap and
    window, None if there is none; cache: block table, keys, values, and strides of blocks and of
    tokens. Keys before `first_key`, the first that a row of the tile sees, are not read: blocks
    before a window may have been released, so they may hold NaN, or be -1 in the table. Returns the
    maximum score and the sum of weights of each row, and the weighted sum of values.
    """
    query, (table, key_cache, value_cache, block_stride, token_stride) = tile[0], cache
    maximum, total, output = nothing_attended(query)
    column = tl.arange(0, query.shape[1])
    for start in range(begin, end, TILE_KEYS):
        key_at = start + tl.arange(0, TILE_KEYS)
        is_inside = key_at < end
        if numbers[2] is not None:
            is_inside = is_inside & (key_at >= first_key)
        block = tl.load(table + key_at // BLOCK_SIZE, mask=is_inside, other=0).to(tl.int64)
        mask = is_inside[:, None] & (column < HEAD_DIM)[None, :]
        row = block * block_stride + key_at % BLOCK_SIZE * token_stride
        keys = tl.load(key_cache + row[:, None] + column[None, :], mask=mask, other=0.0)
        values = tl.load(value_cache + row[:, None] + column[None, :], mask=mask, other=0.0)

        scores = _scores(tile, keys.to(query.dtype), key_at, numbers)
        maximum, total, output = attend_to_tile(query, scores, values, maximum, total, output)
    return maximum, total, output


@triton.jit
def attend_to_tile(query, scores, values, maximum, total, output):
    """Add a tile of keys, given by their scores, to the maximum score and the sum of weights of
    each row, and to the weighted sum of values."""
    higher = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - _finite(higher)[:, None])
    shrink = tl.exp2(maximum - _finite(higher))
    total = tl.fma(total, shrink, tl.sum(weights, axis=1))
    output = output * shrink[:, None]
    output = tl.dot(weights.to(query.dtype), values.to(query.dtype), output, input_precision="ieee")
    return higher, total, output


@triton.jit
def nothing_attended(query):
    """Maximum, sum and weighted values of no keys for the rows of a tile."""
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    return maximum, total, tl.zeros([query.shape[0], query.shape[1]], tl.float32)


@triton.jit
def _with_sink(maximum, total, sink):
    """Add a key of score `sink` and value zero. Returns the sum, and the factor of the output.

    `sink` is minus infinity in rows without a sink.
    """
    higher = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - _finite(higher))
    return tl.fma(total, shrink, tl.exp2(sink - _finite(higher))), shrink


@triton.jit
def _merge(maximum, total, output, part_maximum, part_total, part):
    """Merge maximum, sum and weighted values of two consecutive ranges of keys.

    maximum, total: [rows]; output: [rows, columns].
    """
    higher = tl.maximum(maximum, part_maximum)
    shrink = tl.exp2(maximum - _finite(higher))
    weight = tl.exp2(part_maximum - _finite(higher))
    total = tl.fma(part_total, weight, total * shrink)
    output = tl.fma(part, weight[:, None] + tl.zeros_like(part), output * shrink[:, None])
    return higher, total, output


@triton.jit
def _finish(maximum, total, output, sinks, head, is_row, value_scale, HAS_SINKS: tl.constexpr):
    """Compute attention from maximum, sum and weighted values of all keys of each row."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E
        total, shrink = _with_sink(maximum, total, sink)
        output = output * shrink[:, None]
    return output / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale


@triton.jit
def _split_tokens(context_len, num_splits, SPLIT_TOKENS: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Tokens of a split: the fixed number, or an even share in whole tiles, at least one."""
    even = tl.maximum(tl.cdiv(tl.cdiv(context_len, num_splits), TILE_KEYS), 1) * TILE_KEYS
    return SPLIT_TOKENS if SPLIT_TOKENS > 0 else even


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def plan_splits(
    plan, context_lens, num_seqs, num_programs, LEAST: tl.constexpr, TILE_KEYS: tl.constexpr
):
    """One program: divide contexts into at most `num_programs` splits of equal size.

    Since `sum(ceil(length / keys)) <= sum(length) / keys + num_seqs`, the size is that of an even
    share of all keys among `num_programs - num_seqs` programs, and at least LEAST. plan: int32
    [num_seqs + 2]: the first split of each sequence, the number of splits, the keys of a split.
    """
    at_once: tl.constexpr = 1024
    at = tl.arange(0, at_once)
    keys = 0
    for start in range(0, num_seqs, at_once):
        is_seq = start + at < num_seqs
        keys += tl.sum(tl.load(context_lens + start + at, mask=is_seq, other=0))
    split = tl.maximum(tl.cdiv(keys, num_programs - num_seqs), LEAST)
    split = tl.cdiv(split, TILE_KEYS) * TILE_KEYS
    first = 0
    for start in range(0, num_seqs, at_once):
        is_seq = start + at < num_seqs
        lengths = tl.load(context_lens + start + at, mask=is_seq, other=0)
        counts = tl.cdiv(lengths, split)
        tl.store(plan + start + at, first + tl.cumsum(counts) - counts, mask=is_seq)
        first += tl.sum(counts)
    tl.store(plan + num_seqs, first)
    tl.store(plan + num_seqs + 1, split)


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_tokens", "num_splits", "table_stride"])
def attend(
    output_pointer,
    query_pointer,
    key_cache,
    value_cache,
    sinks,
    alibi_slopes,
    partial_output,
    partial_sums,
    query_start,
    context_lens,
    block_tables,
    plan,
    scale,
    soft_cap,
    value_scale,
    first_seq,
    num_seqs,
    num_tokens,
    num_splits,
    window,
    query_token_stride,
    query_head_stride,
    output_token_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_PLANNED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Program (tile and KV head, split); SPLIT_TOKENS 0 means no fixed size of splits.

    Computes the `num_seqs` sequences from `first_seq` on, which have `num_tokens` rows. Consecutive
    programs compute the KV heads of one tile, which are adjacent in memory. With IS_DECODE, where
    no sequence has more than one row, a tile is a sequence; with IS_PLANNED, it is one of the
    splits of `plan`. With IS_SPLIT, a program computes one split and stores it in the partial
    tensors, [splits, tokens, heads, PADDED_DIM or 2] ([splits, heads, ...] with IS_PLANNED, where a
    sequence with a single split stores its output directly); otherwise, it computes all splits and
    stores the output.
    """
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    query_start += first_seq
    context_lens += first_seq
    first_row = tl.load(query_start)
    split = tl.program_id(1)
    is_partial = IS_SPLIT
    if IS_PLANNED:
        if tile >= tl.load(plan + num_seqs):
            return
        seq = sequence_of_row(plan, num_seqs, tile)
        first_split = tl.load(plan + seq)
        split = tile - first_split
        is_partial = tl.load(plan + seq + 1) > first_split + 1
        seq_start = tl.load(query_start + seq)
        first = 0
    elif IS_DECODE:
        seq = tile
        seq_start = tl.load(query_start + seq)
        first = 0
    else:
        seq = sequence_of(query_start, num_seqs, tile, TILE_TOKENS)
        seq_start = tl.load(query_start + seq)
        first = (tile - seq - (seq_start - first_row) // TILE_TOKENS) * TILE_TOKENS
    query_len = tl.load(query_start + seq + 1) - seq_start
    context_len = tl.load(context_lens + seq)
    if first >= query_len:
        return

    row = tl.arange(0, TILE_ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TILE_TOKENS * GROUP) & (token < query_len)
    row_at = tl.where(is_row, context_len - query_len + token, -1)
    column = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (column < HEAD_DIM)[None, :]
    token = (seq_start + token).to(tl.int64)
    query_row = token * query_token_stride + head * query_head_stride
    query = tl.load(query_pointer + query_row[:, None] + column[None, :], mask=mask, other=0.0)
    tile_rows = query, row_at, None
    if HAS_ALIBI:
        tile_rows = query, row_at, tl.load(alibi_slopes + head, mask=is_row, other=0.0)

    begin, first_key = 0, 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len - query_len + first - window + 1, 0)
        begin = first_key // TILE_KEYS * TILE_KEYS
    end = context_len - query_len + tl.minimum(first + TILE_TOKENS, query_len)
    table = block_tables + (first_seq + seq).to(tl.int64) * table_stride
    key_cache += kv_head.to(tl.int64) * head_stride
    value_cache += kv_head.to(tl.int64) * head_stride
    cache = table, key_cache, value_cache, block_stride, token_stride
    numbers = scale, soft_cap if HAS_CAP else None, window if HAS_WINDOW else None
    split_tokens = _split_tokens(context_len, num_splits, SPLIT_TOKENS, TILE_KEYS)
    if IS_PLANNED:
        split_tokens = tl.load(plan + num_seqs + 1)

    # Without IS_SPLIT, splits of a fixed size are computed and merged here one by one.
    maximum, total, output = nothing_attended(query)
    first_span, step = begin, tl.maximum(end - begin, 1)
    if IS_SPLIT:
        begin = tl.maximum(begin, split * split_tokens)
        end = tl.minimum(end, (split + 1) * split_tokens)
        if begin >= end:
            return
    elif SPLIT_TOKENS > 0:
        first_span, step = begin // SPLIT_TOKENS * SPLIT_TOKENS, SPLIT_TOKENS
    if IS_SPLIT or SPLIT_TOKENS == 0:
        maximum, total, output = _attend_span(
            tile_rows, begin, end, first_key, numbers, cache, BLOCK_SIZE, HEAD_DIM, TILE_KEYS
        )
    else:
        for span in range(first_span, end, step):
            first, last = tl.maximum(begin, span), tl.minimum(end, span + step)
            part_maximum, part_total, part = _attend_span(
                tile_rows, first, last, first_key, numbers, cache, BLOCK_SIZE, HEAD_DIM, TILE_KEYS
            )
            maximum, total, output = _merge(maximum, total, output, part_maximum, part_total, part)
    if is_partial:
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        partial = (split.to(tl.int64) * num_tokens + token - first_row) * num_heads + head
        if IS_PLANNED:
            partial = tile.to(tl.int64) * num_heads + head
        tl.store(partial_output + partial[:, None] * PADDED_DIM + column[None, :], output, mask)
        tl.store(partial_sums + partial * 2, maximum, is_row)
        tl.store(partial_sums + partial * 2 + 1, total, is_row)
    else:
        output = _finish(maximum, total, output, sinks, head, is_row, value_scale, HAS_SINKS)
        output_row = token * output_token_stride + head * HEAD_DIM
        tl.store(
            output_pointer + output_row[:, None] + column[None, :],
            output.to(output_pointer.dtype.element_ty),
            mask,
        )


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_tokens", "num_splits"])
def reduce_splits(
    output_pointer,
    sinks,
    partial_output,
    partial_sums,
    query_start,
    context_lens,
    plan,
    value_scale,
    first_seq,
    num_seqs,
    num_tokens,
    num_splits,
    window,
    output_token_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_PLANNED: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Program (token, head): merge the splits with keys that the row sees, first to last.

    Splits of a fixed size are merged one by one, in the order of a program that computes all splits
    of a tile; others several at once.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    query_start += first_seq
    context_lens += first_seq
    first_row = tl.load(query_start)
    if IS_DECODE:  # one program per sequence, which has at most one row
        seq = token
        token = tl.load(query_start + seq)
        if token == tl.load(query_start + seq + 1):
            return
    else:
        token += first_row
        if token >= tl.load(query_start + num_seqs):
            return
        seq = sequence_of_row(query_start, num_seqs, token)
    context_len = tl.load(context_lens + seq)
    row_at = context_len - tl.load(query_start + seq + 1) + token
    split_tokens = _split_tokens(context_len, num_splits, SPLIT_TOKENS, TILE_KEYS)
    split_stride = num_heads.to(tl.int64) * num_tokens
    first_partial = (token - first_row).to(tl.int64) * num_heads + head
    if IS_PLANNED:
        first = tl.load(plan + seq)
        if tl.load(plan + seq + 1) <= first + 1:  # a single split has stored the output directly
            return
        split_tokens = tl.load(plan + num_seqs + 1)
        split_stride = num_heads.to(tl.int64)
        first_partial = first.to(tl.int64) * num_heads + head
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(row_at - window + 1, 0) // split_tokens

    one = tl.arange(0, 1)
    column = tl.arange(0, PADDED_DIM)
    mask = (one[:, None] == 0) & (column < HEAD_DIM)[None, :]
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    output = tl.zeros([1, PADDED_DIM], tl.float32)
    # cdiv of row_at + 1, because a row without a sequence has row_at -1 and must see no split.
    num_splits_seen = tl.cdiv(row_at + 1, split_tokens)
    if SPLIT_TOKENS > 0:
        for split in range(first_split, num_splits_seen):
            partial = split * split_stride + first_partial + one
            part_maximum = tl.load(partial_sums + partial * 2)
            part_total = tl.load(partial_sums + partial * 2 + 1)
            at = partial[:, None] * PADDED_DIM + column[None, :]
            part = tl.load(partial_output + at, mask=mask, other=0.0)
            maximum, total, output = _merge(maximum, total, output, part_maximum, part_total, part)
    else:
        # Several at once hide the latency of loads; more would not fit into registers.
        at_once: tl.constexpr = 16
        for start in range(first_split, num_splits_seen, at_once):
            split = start + tl.arange(0, at_once)
            is_seen = split < num_splits_seen
            partial = split * split_stride + first_partial
            maxima = tl.load(partial_sums + partial * 2, mask=is_seen, other=float("-inf"))
            totals = tl.load(partial_sums + partial * 2 + 1, mask=is_seen, other=0.0)
            at = partial[:, None] * PADDED_DIM + column[None, :]
            parts = tl.load(partial_output + at, mask=is_seen[:, None] & mask, other=0.0)
            part_maximum = tl.max(maxima, axis=0) + tl.zeros([1], tl.float32)
            weights = tl.exp2(maxima - _finite(part_maximum))
            part_total = tl.sum(totals * weights, axis=0) + tl.zeros([1], tl.float32)
            part = tl.sum(parts * weights[:, None], axis=0)[None, :]
            maximum, total, output = _merge(maximum, total, output, part_maximum, part_total, part)
    output = _finish(maximum, total, output, sinks, head + one, one == 0, value_scale, HAS_SINKS)
    at = (token.to(tl.int64) * output_token_stride + head * HEAD_DIM + one)[:, None]
    tl.store(
        output_pointer + at + column[None, :], output.to(output_pointer.dtype.element_ty), mask=mask
    )
