"""Sampling in plain torch, one row at a time and with a full sort."""

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import (
    COUNT_OCCURS,
    COUNT_ONE_OUTPUT,
    FIRST_DRAFT,
    NO_CANDIDATES,
    NON_FINITE,
    NOT_SAMPLED,
    OFF_CONSTRAINT,
    UNKNOWN_TOKEN,
    PreparedInputs,
    SamplingParam,
    SamplingRows,
    SamplingTables,
    StepInputs,
)
from pagewire_kernels.philox import uniform

_UNEDITED, _SOUND, _UNSOUND = 0, 1, 2


def prepare(
    inputs: StepInputs,
    latest: Tensor,
    num_ahead: Tensor,
    drafts: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_blocks: int,
) -> PreparedInputs:
    """Combine the inputs sent by the host with tokens, progress and block tables on the device.

    latest, num_ahead, drafts: as in `SamplingTables`; the first replaces unknown tokens (by 0 if
    the row has failed), the second is added to positions and to context lengths, the third replaces
    codes of drafts; block_tables: int32 [num_rows, at least max_blocks]; block_size: tokens per
    block, 0 of blocks of states, all of which a sequence with tokens uses, and which have no slots;
    max_blocks: columns of the resulting block tables.
    """
    token_rows, seq_rows = inputs.token_rows.long(), inputs.seq_rows.long()
    known = decode_drafts(inputs.token_ids.long(), token_rows, drafts)
    columns = torch.arange(max_blocks, device=latest.device)
    positions = inputs.positions.long() + num_ahead[token_rows]
    context_lens = inputs.context_lens + num_ahead[seq_rows].int()
    is_used = columns * block_size < context_lens.unsqueeze(1)
    slots = torch.full_like(positions, -1)
    if block_size:
        blocks = block_tables[token_rows, positions // block_size].long()
        slots = torch.where(blocks < 0, -1, blocks * block_size + positions % block_size)
    return PreparedInputs(
        token_ids=torch.where(known == UNKNOWN_TOKEN, latest[token_rows].clamp_min(0), known),
        positions=positions,
        slot_mapping=slots,
        context_lens=context_lens,
        block_tables=block_tables[seq_rows, :max_blocks].masked_fill(~is_used, -1),
    )


def decode_drafts(token_ids: Tensor, row_ids: Tensor, drafts: Tensor) -> Tensor:
    """Replace codes of drafts by these. token_ids, row_ids: int64 [n]; drafts: as in
    `SamplingTables`."""
    if drafts.shape[1] == 0:  # none are made on the device
        return token_ids
    columns = (FIRST_DRAFT - token_ids).clamp(0, drafts.shape[1] - 1)
    return torch.where(token_ids <= FIRST_DRAFT, drafts[row_ids, columns], token_ids)


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set logits of these rows to minus infinity where the row's bit is 0, in place.

    logits: float [num_rows, vocab_size]; rows: int64 [m], distinct; bitmask: int32 [m, at least
    ceil(vocab_size / 32)], one bit per token, the lowest first.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    allowed = bitmask[:, columns // 32] >> (columns % 32).int() & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)


def edit(logits: Tensor, rows: SamplingRows, tables: SamplingTables) -> Tensor:
    """Edit logits in place: add biases, exclude tokens, apply the repetition penalty (Keskar et al.
    2019), then frequency and presence penalties, and exclude tokens that the bitmask excludes.

    logits: float32 [n, vocab_size]. Returns whether the largest logit of each edited row was finite
    before, int32, in a private encoding for `sample`.
    """
    sound = torch.full((len(logits), 1), _UNEDITED, dtype=torch.int32, device=logits.device)
    for row, (row_id, position, mask_row) in enumerate(_columns(rows, tables)):
        params, values = _Params(tables, row_id), logits[row]
        if not (params.num_edits or params.is_penalized or mask_row >= 0):
            continue
        sound[row] = _SOUND if values.max().isfinite() else _UNSOUND
        count = params.num_edits
        applies = position < tables.edit_ends[row_id, :count]
        tokens = tables.edit_tokens[row_id, :count][applies].long()
        numbers = tables.edit_values[row_id, :count][applies]
        values.index_add_(0, tokens[numbers.isfinite()], numbers[numbers.isfinite()])
        values[tokens[~numbers.isfinite()]] = -torch.inf
        if params.is_penalized:
            _penalize(values, tables.counts[row_id], params)
        if mask_row >= 0:
            index = torch.tensor([row], device=logits.device)
            apply_bitmask(logits, index, rows.bitmask[mask_row : mask_row + 1])
    return sound


def _penalize(values: Tensor, entries: Tensor, params: "_Params") -> None:
    counts = entries // COUNT_ONE_OUTPUT
    repetition = values.new_tensor(params.repetition_penalty)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values.copy_(torch.where(entries > 0, repeated, values))
    values -= values.new_tensor(params.frequency_penalty) * counts
    values -= values.new_tensor(params.presence_penalty) * (counts > 0)


def sample(
    logits: Tensor, sound: Tensor, rows: SamplingRows, tables: SamplingTables, outcome: Tensor
) -> None:
    """Write one token, or one of the negative outcomes, per row to `outcome`, int64 [n].

    logits: float32 [n, vocab_size], edited; sound: returned by `edit`. min-p and top-k apply to the
    distribution after temperature, then top-p (Holtzman et al. 2020) to the tokens that they keep.
    A row whose largest logit, edited and divided by the temperature, is not finite has NON_FINITE.
    They reduce to the smallest logit that is kept; all tokens with this logit are kept. The row's
    uniform draw then selects the first token id at which the cumulative probability exceeds it.

    A row that has failed before keeps its outcome. The outcomes of the other rows are stored in the
    tables, and tokens of rows with penalties are counted.
    """
    for row, (row_id, position, mask_row) in enumerate(_columns(rows, tables)):
        params = _Params(tables, row_id)
        number = before = int(tables.latest[row_id])
        if before >= 0:
            has_constraint_failed = mask_row >= 0 and int(rows.bitmask[mask_row, -1]) != 0
            why = OFF_CONSTRAINT if has_constraint_failed else NO_CANDIDATES
            number = _outcome(logits[row], int(sound[row]), position, why, params)
            tables.latest[row_id] = before if number == NOT_SAMPLED else number
        if params.is_penalized and number >= 0:
            _count(tables.counts[row_id], number)
        outcome[row] = number


def accept(
    outcome: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    starts: Tensor,
    num_drafts: Tensor,
    tables: SamplingTables,
) -> Tensor:
    """Accept the drafts of rows up to the first one that differs from what was sampled in its
    place, and store the last token that was sampled so, or the outcome if none was.

    outcome: int64 [m], of consecutive places of each row, sampled as if its drafts before them had
    been output; drafts: int64 [m], the draft that follows each place, if one does, or its code;
    row_ids, starts, num_drafts: int64 [n], of each row its row of the tables, its first place and
    its drafts.
    Returns the number of accepted drafts that a token follows, int32 [n], which are added to
    `num_ahead`. Tokens of rows with penalties are counted.
    """
    counts = []
    columns = (column.tolist() for column in (row_ids, starts, num_drafts))
    sampled = outcome.tolist()
    for row_id, start, num in zip(*columns, strict=True):
        places = slice(start, start + num)
        of_row = torch.full_like(drafts[places], row_id)
        proposed = decode_drafts(drafts[places], of_row, tables.drafts).tolist()
        end = start
        while end < start + num and sampled[end] == proposed[end - start]:
            end += 1
        if end > start and sampled[end] < 0:
            end -= 1
        counts.append(end - start)
        if sampled[end] != NOT_SAMPLED:
            tables.latest[row_id] = sampled[end]
        tables.num_ahead[row_id] += end - start
        if _Params(tables, row_id).is_penalized:
            for token in sampled[start : end + 1]:
                if token >= 0:
                    _count(tables.counts[row_id], token)
    return torch.tensor(counts, dtype=torch.int32, device=outcome.device)


def _count(entries: Tensor, token: int) -> None:
    """Count a token that is output. entries: a row of `SamplingTables.counts`."""
    entries[token] = (int(entries[token]) | COUNT_OCCURS) + COUNT_ONE_OUTPUT


def _outcome(values: Tensor, sound: int, position: int, why: int, params: "_Params") -> int:
    """The outcome of one row. why: the outcome if every token is excluded."""
    largest = values.max()
    has_token, is_excluded = bool(largest.isfinite()), bool(largest == -torch.inf)
    overflows = not (largest / (params.temperature or 1.0)).isfinite() and not is_excluded
    if sound == _UNSOUND or (sound == _UNEDITED and not has_token):
        return NON_FINITE
    if params.offers:  # candidates are edited apart
        return why if why == OFF_CONSTRAINT else NOT_SAMPLED
    if overflows:
        return NON_FINITE
    return _choose(values, position, params) if has_token else why


def _choose(values: Tensor, position: int, params: "_Params") -> int:
    if params.temperature == 0.0:
        return int((values == values.max()).nonzero()[0])
    scaled = values / values.new_tensor(params.temperature)
    weights = torch.exp(scaled - scaled.max()).double()
    weights = weights * (scaled >= _cut(scaled, weights, params))
    cumulative = weights.cumsum(0)
    seeds = np.array([params.seed]).view(np.uint64)
    (draw,) = uniform(seeds, np.array([params.choice_index], np.uint32), np.array([position]))
    above = cumulative > float(draw) * cumulative[-1]
    return int(above.nonzero()[0]) if above.any() else int(weights.nonzero()[-1])


class _Params:
    """The parameters of one row."""

    def __init__(self, tables: SamplingTables, row_id: int) -> None:
        integers = tables.params[row_id].tolist()
        reals = tables.params[row_id].view(torch.float64).tolist()
        self.temperature = reals[SamplingParam.TEMPERATURE]
        self.top_k = integers[SamplingParam.TOP_K]
        self.top_p = reals[SamplingParam.TOP_P]
        self.min_p = reals[SamplingParam.MIN_P]
        self.seed = integers[SamplingParam.SEED]
        self.choice_index = integers[SamplingParam.CHOICE_INDEX]
        self.is_penalized = integers[SamplingParam.IS_PENALIZED] != 0
        self.repetition_penalty = reals[SamplingParam.REPETITION_PENALTY]
        self.frequency_penalty = reals[SamplingParam.FREQUENCY_PENALTY]
        self.presence_penalty = reals[SamplingParam.PRESENCE_PENALTY]
        self.num_edits = integers[SamplingParam.NUM_EDITS]
        self.offers = integers[SamplingParam.OFFERS] != 0


def _columns(rows: SamplingRows, tables: SamplingTables) -> list[tuple[int, int, int]]:
    """(row of the tables, position, row of the bitmask) of each row."""
    positions = rows.positions + tables.num_ahead[rows.row_ids.long()]
    columns = (rows.row_ids.tolist(), positions.tolist(), rows.mask_rows.tolist())
    return list(zip(*columns, strict=True))


def _cut(scaled: Tensor, weights: Tensor, params: _Params) -> Tensor:
    """The smallest scaled logit that is kept."""
    ordered, order = torch.sort(scaled, descending=True)
    cut = ordered[0] + torch.tensor(params.min_p, dtype=torch.float64).log().float()
    if params.top_k > 0:
        cut = torch.maximum(cut, ordered[min(params.top_k, len(ordered)) - 1])
    if params.top_p < 1.0:
        mass = (weights[order] * (ordered >= cut)).cumsum(0)
        has_crossed = mass >= params.top_p * mass[-1]
        cut = torch.maximum(cut, ordered[has_crossed.nonzero()[0]].squeeze())
    return cut


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log softmax of some tokens of each row, and the rank of the first of them.

    logits: [n, vocab_size]; token_ids: int64 [n, m], m >= 1. Returns log probabilities, float32
    [n, m], and ranks, int32 [n]: one more than the number of tokens with a larger logit.
    """
    logits = logits.float()
    own = logits.gather(1, token_ids)
    ranks = (logits > own[:, :1]).sum(dim=-1, dtype=torch.int32) + 1
    return own - torch.logsumexp(logits, dim=-1, keepdim=True), ranks
