"""The Triton kernels of a step's inputs and of sampling; `sampling.py` launches them.

The filters of a row reduce to one number, the cut: the smallest scaled logit that is kept. It is
found without sorting, by bisection over the bits of float32, which have the order of their values
once those of negative numbers are mirrored. Each step is one pass that counts the tokens at or
above the middle, and sums their weights. Once the range has few enough tokens, they are copied to
scratch memory, and the remaining passes read the copy: a few passes over the vocabulary instead of
thirty. Sums are float64, so that the order of summation does not decide which token is drawn.
"""

import triton
import triton.language as tl

from pagewire_kernels import batch
from pagewire_kernels.batch import SamplingParam

LOWEST = tl.constexpr(-2139095041)
"""`_ordered` of minus infinity."""

TEMPERATURE = tl.constexpr(SamplingParam.TEMPERATURE.value)
TOP_K = tl.constexpr(SamplingParam.TOP_K.value)
TOP_P = tl.constexpr(SamplingParam.TOP_P.value)
MIN_P = tl.constexpr(SamplingParam.MIN_P.value)
SEED = tl.constexpr(SamplingParam.SEED.value)
CHOICE_INDEX = tl.constexpr(SamplingParam.CHOICE_INDEX.value)
IS_PENALIZED = tl.constexpr(SamplingParam.IS_PENALIZED.value)
REPETITION_PENALTY = tl.constexpr(SamplingParam.REPETITION_PENALTY.value)
FREQUENCY_PENALTY = tl.constexpr(SamplingParam.FREQUENCY_PENALTY.value)
PRESENCE_PENALTY = tl.constexpr(SamplingParam.PRESENCE_PENALTY.value)
NUM_EDITS = tl.constexpr(SamplingParam.NUM_EDITS.value)
OFFERS = tl.constexpr(SamplingParam.OFFERS.value)

NON_FINITE = tl.constexpr(batch.NON_FINITE)
NO_CANDIDATES = tl.constexpr(batch.NO_CANDIDATES)
OFF_CONSTRAINT = tl.constexpr(batch.OFF_CONSTRAINT)
NOT_SAMPLED = tl.constexpr(batch.NOT_SAMPLED)
UNKNOWN_TOKEN = tl.constexpr(batch.UNKNOWN_TOKEN)
FIRST_DRAFT = tl.constexpr(batch.FIRST_DRAFT)
COUNT_OCCURS = tl.constexpr(batch.COUNT_OCCURS)
COUNT_ONE_OUTPUT = tl.constexpr(batch.COUNT_ONE_OUTPUT)

HAS_FINITE = tl.constexpr(1)
HAS_UNSOUND = tl.constexpr(2)

# The alignment of columns and the values of strides differ from batch to batch. If kernels were
# specialized by them, they would be compiled again while requests wait.
_COLUMNS = ["outcome", "row_ids", "positions", "mask_rows", "bitmask", "num_ahead"]
_VERIFIED = ["outcome", "drafts", "row_ids", "starts", "num_drafts", "num_ahead"]
_COUNTS = ["bitmask_stride", "table_stride", "drafts_stride"]


@triton.jit
def _real(param):
    """Load a float64 parameter, which is stored by its bits."""
    return tl.load(param).to(tl.float64, bitcast=True)


@triton.jit
def uniform(seed, choice_index, position):
    """A float64 in [0, 1): the top 53 of the first 64 bits of Philox4x32-10."""
    zero = position * 0
    high, low, _, _ = tl.philox(
        seed,
        choice_index.to(tl.uint32),
        position.to(tl.uint32),
        zero.to(tl.uint32),
        zero.to(tl.uint32),
    )
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _ordered(x):
    """int64 with the order of float32 numbers; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _scaled(row, at):
    """Return logits of a row divided by the temperature, rounded as in torch, and which are in the
    row; the others are minus infinity.

    row: logits, their number, the temperature, and the largest logit divided by it.
    """
    values, length, temperature, _ = row
    x = tl.load(values + at, at < length, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature + tl.zeros_like(x)), at < length


@triton.jit
def _weights(row, at, cut):
    """Weights of a row's logits in float64, zero below the cut, and which are kept."""
    x, mask = _scaled(row, at)
    is_kept = (_ordered(x) >= cut) & mask
    return tl.where(is_kept, tl.exp(x - row[3]), 0.0).to(tl.float64), is_kept


@triton.jit
def _peak(x, at):
    """The largest value of a tile, infinity if there is a NaN, and its first index."""
    maximum = tl.max(tl.where(x != x, float("inf"), x), axis=0)
    return maximum, tl.min(tl.where(x == maximum, at, 0x7FFFFFFF), axis=0)


@triton.jit
def _of_row(tiles, num_cells, NUM_TILES: tl.constexpr):
    """Return the largest logit of a row and its first index, and whether its maximum was finite
    before it was edited, from what `edit` found in its tiles."""
    tile = tl.arange(0, triton.next_power_of_2(NUM_TILES))
    is_tile = tile < NUM_TILES
    seen = tl.load(tiles + tile, is_tile, other=0)
    peaks = tl.load(tiles + num_cells + tile, is_tile, other=0).to(tl.float32, bitcast=True)
    peaks = tl.where(is_tile, peaks, float("-inf"))
    places = tl.load(tiles + 2 * num_cells + tile, is_tile, other=0x7FFFFFFF)
    largest = tl.max(peaks, axis=0)
    first = tl.min(tl.where(peaks == largest, places, 0x7FFFFFFF), axis=0)
    has_finite = tl.max(seen & HAS_FINITE, axis=0)
    has_unsound = tl.max(seen & HAS_UNSOUND, axis=0)
    return largest, first, (has_finite > 0) & (has_unsound == 0)


@triton.jit
def _weigh(row, cut, TILE: tl.constexpr):
    """Return the number of entries at or above the cut, and the sum of their weights."""
    lane = tl.arange(0, TILE)
    counts = lane * 0
    masses = tl.zeros([TILE], tl.float64)
    for start in range(0, row[1], TILE):
        weights, is_kept = _weights(row, start + lane, cut)
        counts += is_kept.to(tl.int32)
        masses += weights
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _find_cut(row, low, high, ceiling, top_k, top_p, total, TILE: tl.constexpr):
    """Return the largest cut that keeps `top_k` tokens, and of these a share of at least `top_p`.

    The cut is at least `low`; that of top-k is below `high`, and that of top-p below `ceiling`.
    `total` is the weight of which top-p is a share if there is no top-k.
    """
    while (top_k > 0) & (high - low > 1):
        middle = low + (high - low) // 2
        count, _ = _weigh(row, middle, TILE)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle)
    if top_k > 0:
        _, total = _weigh(row, low, TILE)
    high = ceiling
    while (top_p < 1.0) & (high - low > 1):
        middle = low + (high - low) // 2
        _, mass = _weigh(row, middle, TILE)
        low = tl.where(mass >= top_p * total, middle, low)
        high = tl.where(mass >= top_p * total, high, middle)
    return low


@triton.jit
def _copy_candidates(row, cut, target_values, target_ids, TILE: tl.constexpr):
    """Copy scaled logits at or above the cut, and their token ids, in the order of ids."""
    num_copied = 0
    for start in range(0, row[1], TILE):
        at = start + tl.arange(0, TILE)
        x, mask = _scaled(row, at)
        is_kept = (_ordered(x) >= cut) & mask
        ones = is_kept.to(tl.int32)
        target = num_copied + tl.cumsum(ones, axis=0) - 1
        tl.store(target_values + target, x, is_kept)
        tl.store(target_ids + target, at, is_kept)
        num_copied += tl.sum(ones, axis=0)


@triton.jit
def _draw(row, cut, draw, TILE: tl.constexpr):
    """Return the first index at which the cumulative weight of kept entries exceeds `draw` times
    their total.

    If rounding leaves no such index, it is the last one with a positive weight.
    """
    _, total = _weigh(row, cut, TILE)
    goal = draw * total
    mass = total * 0.0
    before = mass
    tile = -1
    for start in range(0, row[1], TILE):
        weights = _weights(row, start + tl.arange(0, TILE), cut)[0]
        tile_mass = tl.sum(weights, axis=0)
        # Remember the last tile with a weight that starts at or before the goal.
        is_next = (mass <= goal) & (tile_mass > 0.0)
        tile = tl.where(is_next, start, tile)
        before = tl.where(is_next, mass, before)
        mass += tile_mass
    at = tile + tl.arange(0, TILE)
    weights = _weights(row, at, cut)[0]
    is_above = (before + tl.cumsum(weights, axis=0) > goal) & (weights > 0.0)
    first = tl.min(tl.where(is_above, at, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(weights > 0.0, at, -1), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _choose(logits, scratch, params, position, peak, vocab_size, CAPACITY, TILE: tl.constexpr):
    """Return the token of a row whose largest logit is finite.

    scratch: memory for candidates and their ids, [CAPACITY] each; peak: the largest logit and its
    first index.
    """
    (largest, first), (candidates, candidate_ids) = peak, scratch
    temperature = _real(params + TEMPERATURE).to(tl.float32)
    token = first.to(tl.int64)
    if temperature != 0.0:
        top_k, top_p = tl.load(params + TOP_K), _real(params + TOP_P)
        min_p = _real(params + MIN_P)
        maximum = tl.div_rn(largest, temperature)
        ceiling = _ordered(maximum) + 1
        floor = ceiling * 0 + LOWEST
        if min_p > 0.0:
            floor = _ordered(maximum + tl.log(min_p).to(tl.float32))
        draw = uniform(tl.load(params + SEED), tl.load(params + CHOICE_INDEX), position)
        row = logits, vocab_size, temperature, maximum
        count, total = _weigh(row, floor, TILE)
        low, high = floor, ceiling
        is_narrowing = (top_k > 0) | (top_p < 1.0)
        while is_narrowing & (count > CAPACITY) & (high - low > 1):
            middle = low + (high - low) // 2
            middle_count, mass = _weigh(row, middle, TILE)
            is_below = tl.where(top_k > 0, middle_count >= top_k, mass >= top_p * total)
            low = tl.where(is_below, middle, low)
            count = tl.where(is_below, middle_count, count)
            high = tl.where(is_below, high, middle)

        if count <= CAPACITY:
            _copy_candidates(row, low, candidates, candidate_ids, TILE)
            tl.debug_barrier()  # values stored by other threads of the program are read below
            copied = candidates, count, 1.0, maximum
            cut = _find_cut(copied, low, high, ceiling, top_k, top_p, total, TILE)
            place = _draw(copied, cut, draw, TILE)
            token = tl.load(candidate_ids + place).to(tl.int64)
        else:
            cut = _find_cut(row, low, high, ceiling, top_k, top_p, total, TILE)
            token = _draw(row, cut, draw, TILE).to(tl.int64)
    return token


@triton.jit
def _count(entry):
    """Count a token that is output, in its entry of `SamplingTables.counts`."""
    tl.store(entry, (tl.load(entry) | COUNT_OCCURS) + COUNT_ONE_OUTPUT)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_COLUMNS)
def sample(
    outcome,
    logits,
    tiles,
    candidates,
    candidate_ids,
    row_ids,
    positions,
    mask_rows,
    bitmask,
    param_table,
    latest,
    num_ahead,
    counts,
    vocab_size,
    logits_stride,
    bitmask_stride,
    NUM_PARAMS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row). candidates, candidate_ids: scratch memory, [num_rows, CAPACITY]."""
    row = tl.program_id(0).to(tl.int64)
    row_id = tl.load(row_ids + row).to(tl.int64)
    before = tl.load(latest + row_id)
    number = before
    if before >= 0:
        own = param_table + row_id * NUM_PARAMS
        values = logits + row * logits_stride
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        is_penalized = tl.load(own + IS_PENALIZED) != 0
        offers = tl.load(own + OFFERS) != 0
        num_cells = tl.num_programs(0) * NUM_TILES
        largest, first, is_sound = _of_row(tiles + row * NUM_TILES, num_cells, NUM_TILES)
        has_token = largest > float("-inf")
        temperature = _real(own + TEMPERATURE).to(tl.float32)
        scaled = tl.abs(tl.div_rn(largest, tl.where(temperature == 0.0, 1.0, temperature)))
        # Candidates are edited apart.
        is_sound = is_sound & ((scaled < float("inf")) | (has_token == 0) | offers)
        why = before * 0 + NO_CANDIDATES
        if mask_row >= 0:
            last_word = tl.load(bitmask + mask_row * bitmask_stride + bitmask_stride - 1)
            why = tl.where(last_word != 0, OFF_CONSTRAINT, why)
        if is_sound == 0:
            number = before * 0 + NON_FINITE
        elif offers:
            number = tl.where(why == OFF_CONSTRAINT, why, NOT_SAMPLED)
        elif has_token:
            scratch = candidates + row * CAPACITY, candidate_ids + row * CAPACITY
            position = tl.load(positions + row) + tl.load(num_ahead + row_id).to(tl.int32)
            peak = largest, first
            number = _choose(values, scratch, own, position, peak, vocab_size, CAPACITY, TILE)
        else:
            number = why
        tl.store(latest + row_id, tl.where(number == NOT_SAMPLED, before, number))
        if is_penalized & (number >= 0):
            _count(counts + row_id * vocab_size + number)
    tl.store(outcome + row, number)


@triton.jit
def _decode(token, row_id, draft_table, drafts_stride, mask):
    """Replace codes of drafts by these, where `mask` is set."""
    is_draft = mask & (token <= FIRST_DRAFT)
    place = draft_table + row_id * drafts_stride + FIRST_DRAFT - token
    return tl.where(is_draft, tl.load(place, is_draft, other=0), token)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_VERIFIED)
def accept(
    accepted,
    outcome,
    drafts,
    row_ids,
    starts,
    num_drafts,
    param_table,
    latest,
    num_ahead,
    draft_table,
    counts,
    vocab_size,
    drafts_stride,
    NUM_PARAMS: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    row_id = tl.load(row_ids + row)
    start = tl.load(starts + row)
    last = start + tl.load(num_drafts + row)
    end = start
    number = tl.load(outcome + end)
    before = number
    draft = _decode(tl.load(drafts + end), row_id, draft_table, drafts_stride, end < last)
    is_equal = (end < last) & (number == draft)
    while is_equal:
        end += 1
        before = number
        number = tl.load(outcome + end)
        draft = _decode(tl.load(drafts + end), row_id, draft_table, drafts_stride, end < last)
        is_equal = (end < last) & (number == draft)
    is_failed = (end > start) & (number < 0)
    number = tl.where(is_failed, before, number)
    end = tl.where(is_failed, end - 1, end)
    count = (end - start).to(tl.int32)
    tl.store(accepted + row, count)
    tl.store(latest + row_id, number, number != NOT_SAMPLED)
    tl.store(num_ahead + row_id, tl.load(num_ahead + row_id) + count)
    is_penalized = tl.load(param_table + row_id * NUM_PARAMS + IS_PENALIZED) != 0
    if is_penalized & (number >= 0):
        for place in range(start, end + 1):
            _count(counts + row_id * vocab_size + tl.load(outcome + place))


@triton.jit
def _seen(x, mask):
    """The bits that `edit` reports for each of these logits."""
    is_unsound = (x != x) | (x == float("inf"))
    is_finite = (is_unsound == 0) & (x > float("-inf"))
    seen = tl.where(is_unsound, HAS_UNSOUND, 0) | tl.where(is_finite, HAS_FINITE, 0)
    return tl.where(mask, seen, 0)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_COLUMNS)
def edit(
    logits,
    tiles,
    row_ids,
    positions,
    mask_rows,
    bitmask,
    param_table,
    num_ahead,
    counts,
    edit_tokens,
    edit_values,
    edit_ends,
    vocab_size,
    logits_stride,
    bitmask_stride,
    NUM_PARAMS: tl.constexpr,
    MAX_EDITS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    TILE_EDITS: tl.constexpr,
):
    """Program (row, tile): edit one tile of a row's logits; all edits of the row are searched.

    tiles: int32 [3, rows, tiles]: what was seen before, then the bits of the tile's largest logit
    and its index. Biases are applied before exclusions. A barrier separates the passes over the
    edits, since a thread may read values that another thread has stored.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE
    row_id = tl.load(row_ids + row).to(tl.int64)
    params = param_table + row_id * NUM_PARAMS
    mask_row = tl.load(mask_rows + row).to(tl.int64)
    num_edits = tl.load(params + NUM_EDITS)
    is_penalized = tl.load(params + IS_PENALIZED) != 0
    position = tl.load(positions + row) + tl.load(num_ahead + row_id).to(tl.int32)
    logits += row * logits_stride
    seen = tl.arange(0, TILE) * 0
    excluded_seen = tl.arange(0, TILE_EDITS) * 0
    for excludes in tl.static_range(2):
        for first in range(0, num_edits, TILE_EDITS):
            at = first + tl.arange(0, TILE_EDITS)
            entry = row_id * MAX_EDITS + at
            is_entry = at < num_edits
            token = tl.load(edit_tokens + entry, is_entry, other=-1)
            value = tl.load(edit_values + entry, is_entry, other=0.0)
            ends = tl.load(edit_ends + entry, is_entry, other=0)
            applies = is_entry & (token >= start) & (token < start + TILE) & (position < ends)
            applies = applies & ((value == float("-inf")) == (excludes == 1))
            x = tl.load(logits + token, applies, other=0.0)
            if excludes == 1:
                excluded_seen = excluded_seen | _seen(x, applies)
                tl.store(logits + token, value, applies)
            else:
                tl.store(logits + token, x + value, applies)
        tl.debug_barrier()
    at = start + tl.arange(0, TILE)
    is_token = at < vocab_size
    x = tl.load(logits + at, is_token, other=float("-inf"))
    seen = seen | _seen(x, is_token)
    if is_penalized:
        entries = tl.load(counts + row_id * vocab_size + at, is_token, other=0)
        num_outputs = (entries // COUNT_ONE_OUTPUT).to(tl.float32)
        repetition = _real(params + REPETITION_PENALTY).to(tl.float32) + tl.zeros_like(x)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(entries > 0, repeated, x)
        x = x - _real(params + FREQUENCY_PENALTY).to(tl.float32) * num_outputs
        presence = _real(params + PRESENCE_PENALTY).to(tl.float32)
        x = x - presence * (num_outputs > 0.0).to(tl.float32)
    if mask_row >= 0:
        words = tl.load(bitmask + mask_row * bitmask_stride + at // 32, is_token, other=-1)
        x = tl.where(((words >> (at % 32)) & 1) != 0, x, float("-inf"))
    if is_penalized | (mask_row >= 0):
        tl.store(logits + at, x, is_token)
    cell = tiles + row * NUM_TILES + tl.program_id(1)
    num_cells = tl.num_programs(0) * NUM_TILES
    maximum, place = _peak(x, at)
    tl.store(cell, _either(seen) | _either(excluded_seen))
    tl.store(cell + num_cells, maximum.to(tl.int32, bitcast=True))
    tl.store(cell + 2 * num_cells, place)


@triton.jit
def _either(seen):
    """The bits that are set in any element."""
    return tl.max(seen & HAS_FINITE, axis=0) | tl.max(seen & HAS_UNSOUND, axis=0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "width", *_COUNTS],
    do_not_specialize_on_alignment=[
        "token_ids",
        "positions",
        "token_rows",
        "seq_rows",
        "context_lens",
        "num_ahead",
        "new_token_ids",
        "new_positions",
        "new_slot_mapping",
    ],
)
def prepare(
    token_ids,
    positions,
    token_rows,
    seq_rows,
    context_lens,
    latest,
    num_ahead,
    draft_table,
    block_tables,
    new_token_ids,
    new_positions,
    new_slot_mapping,
    new_context_lens,
    new_block_tables,
    num_tokens,
    num_seqs,
    width,
    table_stride,
    drafts_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (sequence or tile of tokens, tile of blocks)."""
    number, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    if number < num_seqs:
        row = tl.load(seq_rows + number).to(tl.int64)
        length = tl.load(context_lens + number) + tl.load(num_ahead + row).to(tl.int32)
        tl.store(new_context_lens + number, length, tl.program_id(1) == 0)
        if BLOCK_SIZE == 0:  # of states
            num_blocks = tl.where(length > 0, width, 0)
        else:
            num_blocks = tl.cdiv(length, BLOCK_SIZE)
        blocks = tl.load(block_tables + row * table_stride + column, column < num_blocks, other=-1)
        target = new_block_tables + number.to(tl.int64) * width + column
        tl.store(target, blocks, column < width)
    if tl.program_id(1) == 0:
        at = number * TILE + tl.arange(0, TILE)
        mask = at < num_tokens
        token = tl.load(token_ids + at, mask, other=0).to(tl.int64)
        row = tl.load(token_rows + at, mask, other=0).to(tl.int64)
        is_unknown = mask & (token == UNKNOWN_TOKEN)
        known = tl.maximum(tl.load(latest + row, is_unknown, other=0), 0)
        token = _decode(token, row, draft_table, drafts_stride, mask)
        tl.store(new_token_ids + at, tl.where(is_unknown, known, token), mask)
        position = tl.load(positions + at, mask, other=0) + tl.load(num_ahead + row, mask, other=0)
        tl.store(new_positions + at, position, mask)
        if BLOCK_SIZE == 0:
            slots = row * 0 - 1
        else:
            entry = block_tables + row * table_stride + position // BLOCK_SIZE
            block = tl.load(entry, mask, other=-1).to(tl.int64)
            slots = tl.where(block < 0, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(new_slot_mapping + at, slots, mask)


@triton.jit
def logprobs(
    output,
    ranks,
    logits,
    token_ids,
    vocab_size,
    num_tokens,
    logits_stride,
    TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Program (row): log softmax of the row's tokens, and the rank of the first."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    own = tl.load(logits + tl.load(token_ids + row * num_tokens)).to(tl.float32)
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        at = start + lane
        x = tl.load(logits + at, at < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.where(x > best, x, best)  # not a NaN
    maximum = tl.max(best, axis=0)
    masses = tl.zeros([TILE], tl.float64)
    larger = lane * 0
    for start in range(0, vocab_size, TILE):
        at = start + lane
        x = tl.load(logits + at, at < vocab_size, other=float("-inf")).to(tl.float32)
        masses += tl.exp(x - maximum).to(tl.float64)
        larger += (x > own).to(tl.int32)
    logsum = maximum + tl.log(tl.sum(masses, axis=0)).to(tl.float32)
    column = tl.arange(0, TILE_TOKENS)
    mask = column < num_tokens
    token_id = tl.load(token_ids + row * num_tokens + column, mask, other=0)
    x = tl.load(logits + token_id, mask, other=0.0).to(tl.float32)
    tl.store(output + row * num_tokens + column, x - logsum, mask)
    tl.store(ranks + row, tl.sum(larger, axis=0) + 1)
