"""The Triton kernels of sampling; `sampling.py` launches them.

A row's filters come down to one number, the cut: the smallest scaled logit that stays. It is found
without sorting, by bisection over the bits of float32, which order as their values do once those of
negative numbers are mirrored. Each step is one pass that counts and weighs what is at or above the
middle. Once the range holds few enough tokens they are copied out, and the rest of the passes go
over the copy: a few passes over the vocabulary instead of thirty. Sums are float64, so that the
order of summation does not decide which token is drawn.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)
"""`_ordered` of minus infinity."""


@triton.jit
def uniform(seed, choice_index, position):
    """A float64 from [0, 1): the top 53 of the first 64 bits of Philox4x32-10."""
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
    """int64 that order as the float32 numbers do; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _scaled(values, at, mask, temperature):
    """Logits over temperature, rounded as torch rounds; minus infinity outside of the mask."""
    x = tl.load(values + at, mask, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
def _largest(values, length, TILE: tl.constexpr):
    """The largest value, the first place it stands at, and whether there is a NaN."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_at = lane * 0
    nans = lane * 0
    for start in range(0, length, TILE):
        at = start + lane
        x = tl.load(values + at, at < length, other=float("-inf")).to(tl.float32)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_at = tl.where(is_better, at, best_at)
        nans = nans | (x != x).to(tl.int32)
    maximum = tl.max(best, axis=0)
    first = tl.min(tl.where(best == maximum, best_at, 0x7FFFFFFF), axis=0)
    return maximum, first, tl.max(nans, axis=0)


@triton.jit
def _weigh(values, length, temperature, maximum, cut, TILE: tl.constexpr):
    """How many entries are at or above the cut, and the sum of their weights."""
    lane = tl.arange(0, TILE)
    counts = lane * 0
    masses = tl.zeros([TILE], tl.float64)
    for start in range(0, length, TILE):
        at = start + lane
        x = _scaled(values, at, at < length, temperature)
        is_kept = (_ordered(x) >= cut) & (at < length)
        counts += is_kept.to(tl.int32)
        masses += tl.where(is_kept, tl.exp(x - maximum), 0.0).to(tl.float64)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _find_cut(
    values,
    length,
    temperature,
    maximum,
    low,
    high,
    ceiling,
    top_k,
    top_p,
    total,
    TILE: tl.constexpr,
):
    """The largest cut at which `top_k` tokens stay, then that at which `top_p` of these do.

    It is at least `low`; for top-k it is known to be below `high`. `total` is the weight that top-p
    takes its share of where there is no top-k.
    """
    while (top_k > 0) & (high - low > 1):
        middle = low + (high - low) // 2
        count, _ = _weigh(values, length, temperature, maximum, middle, TILE)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle)
    if top_k > 0:
        _, total = _weigh(values, length, temperature, maximum, low, TILE)
    high = ceiling
    while (top_p < 1.0) & (high - low > 1):
        middle = low + (high - low) // 2
        _, mass = _weigh(values, length, temperature, maximum, middle, TILE)
        low = tl.where(mass >= top_p * total, middle, low)
        high = tl.where(mass >= top_p * total, high, middle)
    return low


@triton.jit
def _copy_candidates(
    values, length, temperature, cut, target_values, target_ids, TILE: tl.constexpr
):
    """Copy scaled logits at or above the cut, and their token ids, in order."""
    num_copied = 0
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        x = _scaled(values, at, at < length, temperature)
        is_kept = (_ordered(x) >= cut) & (at < length)
        ones = is_kept.to(tl.int32)
        target = num_copied + tl.cumsum(ones, axis=0) - 1
        tl.store(target_values + target, x, is_kept)
        tl.store(target_ids + target, at, is_kept)
        num_copied += tl.sum(ones, axis=0)


@triton.jit
def _draw(values, length, temperature, maximum, cut, draw, TILE: tl.constexpr):
    """The first place where the cumulative weight of what stays exceeds `draw` of its total.

    Rounding may leave no such place; then it is the last one with a weight.
    """
    _, total = _weigh(values, length, temperature, maximum, cut, TILE)
    goal = draw * total
    mass = total * 0.0
    before = mass
    tile = -1
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        x = _scaled(values, at, at < length, temperature)
        is_kept = (_ordered(x) >= cut) & (at < length)
        weights = tl.where(is_kept, tl.exp(x - maximum), 0.0).to(tl.float64)
        tile_mass = tl.sum(weights, axis=0)
        # Until the goal is passed each tile with a weight is remembered, the last in case none is.
        is_next = (mass <= goal) & (tile_mass > 0.0)
        tile = tl.where(is_next, start, tile)
        before = tl.where(is_next, mass, before)
        mass += tile_mass
    at = tile + tl.arange(0, TILE)
    x = _scaled(values, at, at < length, temperature)
    is_kept = (_ordered(x) >= cut) & (at < length)
    weights = tl.where(is_kept, tl.exp(x - maximum), 0.0).to(tl.float64)
    is_above = (before + tl.cumsum(weights, axis=0) > goal) & (weights > 0.0)
    first = tl.min(tl.where(is_above, at, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(weights > 0.0, at, -1), axis=0)
    return tl.minimum(first, last)


# Columns begin where a batch's size leaves them: were that looked at, an odd number of rows would
# compile the kernel again while requests wait.
@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures",
        "top_ks",
        "top_ps",
        "min_ps",
        "seeds",
        "choice_indices",
        "positions",
    ]
)
def sample(
    tokens,
    logits,
    candidates,
    candidate_ids,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    choice_indices,
    positions,
    vocab_size,
    logits_stride,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row). candidates, candidate_ids: [num_rows, CAPACITY] of scratch memory."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    largest, first, has_nan = _largest(logits, vocab_size, TILE)
    if (has_nan > 0) | (largest == float("inf")) | (largest == float("-inf")):
        tl.store(tokens + row, -1)
        return
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        tl.store(tokens + row, first.to(tl.int64))
        return

    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    maximum = tl.div_rn(largest, temperature)
    ceiling = _ordered(maximum) + 1
    floor = ceiling * 0 + LOWEST
    if min_p > 0.0:
        floor = _ordered(maximum + tl.log(min_p).to(tl.float32))
    draw = uniform(tl.load(seeds + row), tl.load(choice_indices + row), tl.load(positions + row))
    count, total = _weigh(logits, vocab_size, temperature, maximum, floor, TILE)
    low, high = floor, ceiling
    is_narrowing = (top_k > 0) | (top_p < 1.0)
    while is_narrowing & (count > CAPACITY) & (high - low > 1):
        middle = low + (high - low) // 2
        middle_count, mass = _weigh(logits, vocab_size, temperature, maximum, middle, TILE)
        is_below = tl.where(top_k > 0, middle_count >= top_k, mass >= top_p * total)
        low = tl.where(is_below, middle, low)
        count = tl.where(is_below, middle_count, count)
        high = tl.where(is_below, high, middle)

    if count <= CAPACITY:
        candidates += row * CAPACITY
        candidate_ids += row * CAPACITY
        _copy_candidates(logits, vocab_size, temperature, low, candidates, candidate_ids, TILE)
        tl.debug_barrier()  # what other threads of the program have stored is read from here on
        cut = _find_cut(
            candidates, count, 1.0, maximum, low, high, ceiling, top_k, top_p, total, TILE
        )
        place = _draw(candidates, count, 1.0, maximum, cut, draw, TILE)
        token = tl.load(candidate_ids + place)
    else:
        cut = _find_cut(
            logits,
            vocab_size,
            temperature,
            maximum,
            low,
            high,
            ceiling,
            top_k,
            top_p,
            total,
            TILE,
        )
        token = _draw(logits, vocab_size, temperature, maximum, cut, draw, TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def apply_bitmask(
    logits, rows, bitmask, vocab_size, logits_stride, bitmask_stride, TILE: tl.constexpr
):
    """A program per row and tile: minus infinity over every token whose bit is 0."""
    entry = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token < vocab_size
    words = tl.load(bitmask + entry * bitmask_stride + token // 32, is_token, other=-1)
    is_allowed = ((words >> (token % 32)) & 1) != 0
    row = tl.load(rows + entry)
    excluded = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(
        logits + row * logits_stride + token,
        excluded.to(logits.dtype.element_ty),
        is_token & (is_allowed == 0),
    )


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
    """Program (row): log softmax at the row's tokens, and the rank of the first."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    maximum, _, _ = _largest(logits, vocab_size, TILE)
    own = tl.load(logits + tl.load(token_ids + row * num_tokens)).to(tl.float32)
    lane = tl.arange(0, TILE)
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
