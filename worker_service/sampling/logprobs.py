"""Log probabilities of the model's own distribution, before penalties and temperature: of sampled
tokens, of prompt tokens, and of the candidates among which the core chooses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.array_types import Float32Array, Int32Array, Int64Array
from worker_service.models.interface import Model
from worker_service.pinned_memory import upload
from worker_service.plan import Candidates, PromptLogprobs, TokenLogprobs
from worker_service.sampling.draw import largest

MIN_WINDOW = 32
"""Minimum number of logits examined for the most probable tokens. Ties among them are ordered by
token id; a window as large as the batch's largest request could make ties depend on other rows."""


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Log probabilities of one chosen and the most probable tokens of each row."""

    token_ids: npt.NDArray[np.int32]
    """[n, 1 + window]."""

    logprobs: npt.NDArray[np.float32]
    """[n, 1 + window]."""

    ranks: npt.NDArray[np.int32]
    """[n]."""

    def row(self, index: int, num_top: int) -> TokenLogprobs:
        """One row with as many of the most probable tokens as asked for."""
        return TokenLogprobs(
            token_ids=self.token_ids[index, : 1 + num_top],
            logprobs=self.logprobs[index, : 1 + num_top],
            rank=int(self.ranks[index]),
        )


def logprob_table(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTable:
    """Log softmax at the given tokens and at the `num_top` most probable ones, or a few more.

    logits: float32 [n, vocab_size]; token_ids: int64 [n]. A token's rank is one more than the
    number of tokens more probable than it.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1) + 1
    top_ids, top = token_ids.new_empty((len(logits), 0)), logprobs[:, :0]
    if num_top > 0:
        top, top_ids = largest(logprobs, window(num_top, logprobs.shape[1]))
    ids = torch.cat([token_ids.unsqueeze(1), top_ids], dim=1)
    values = torch.cat([own, top], dim=1)
    return table_of(ids.cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy())


def table_of(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32], ranks: npt.NDArray[np.integer]
) -> LogprobTable:
    """A table from each row's own token, which stays first, and the others in any order."""
    top_ids, top = _order(ids[:, 1:], values[:, 1:])
    return LogprobTable(
        np.concatenate([ids[:, :1], top_ids], axis=1).astype(np.int32),
        np.concatenate([values[:, :1], top], axis=1),
        ranks.astype(np.int32),
    )


def window(num_top: int, vocab_size: int) -> int:
    """Number of a row's largest logits to examine for its `num_top` most probable tokens."""
    return min(max(num_top, MIN_WINDOW), vocab_size)


def _order(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Columns by falling value, the lower token id first among equals."""
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def to_logprobs(logits: Tensor, rows: Int64Array) -> None:
    """Turn these rows' logits into log probabilities, in place; edits then apply to those."""
    index = upload(rows, logits.device)
    logits[index] = torch.log_softmax(logits[index], dim=-1)


def offer(logprobs: Tensor, rows: Int64Array, counts: Int32Array) -> dict[int, Candidates]:
    """The most probable tokens of these rows that are not excluded, by row. Among equals the lowest
    ids come first, whatever other rows ask for.

    logprobs: float32 [n, vocab_size]; counts: [len(rows)], how many are returned of each.
    """
    index = upload(rows, logprobs.device)
    # One more than is returned, to see whether those returned end among equals.
    num_top = window(int(counts.max()) + 1, logprobs.shape[1])
    top, top_ids = largest(logprobs[index], num_top)
    token_ids, values = _order(top_ids.cpu().numpy(), top.cpu().numpy())
    found = {}
    for place, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        ids, best = token_ids[place], values[place]
        kept = min(count, int(np.isfinite(best).sum()))
        if kept and best[kept - 1] == best[-1] and len(best) < logprobs.shape[1]:
            ids, best = _sorted(logprobs[row])
        found[row] = Candidates(token_ids=ids[:kept].astype(np.int32), logprobs=best[:kept])
    return found


def _sorted(logprobs: Tensor) -> tuple[Int64Array, Float32Array]:
    """All tokens of a row: ids and log probabilities, the lower id first among equals."""
    values = logprobs.cpu().numpy()
    ids = np.argsort(-values, kind="stable")
    return ids, values[ids]


MAX_LOGITS_BYTES = 64 * 2**20
"""Logits computed at once. They need a whole vocabulary's row per token, so a long prompt's would
not fit into memory."""


def prompt_logprobs(
    model: Model, hidden: Tensor, token_ids: Int32Array, start: int, num_top: int
) -> PromptLogprobs:
    """Log probabilities of consecutive prompt tokens and of the most probable ones in their place.

    hidden: [num_tokens, hidden_size], the states that predict them; token_ids: the prompt's own;
    start: position of the first.
    """
    targets = upload(token_ids.astype("int64"), hidden.device)
    pieces = prompt_logits(model, hidden, targets)
    return of_prompt(start, num_top, [logprob_table(*piece, num_top) for piece in pieces])


def prompt_logits(model: Model, hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits at hidden states, in pieces, and the tokens that each piece predicts."""
    piece = max(1, MAX_LOGITS_BYTES // (4 * model.vocab_size))
    for part, target in zip(hidden.split(piece), targets.split(piece), strict=True):
        yield model.compute_logits(part), target


def of_prompt(start: int, num_top: int, tables: Sequence[LogprobTable]) -> PromptLogprobs:
    """Those of consecutive prompt tokens from position `start` on."""
    return PromptLogprobs(
        start=start,
        token_ids=np.concatenate([table.token_ids[:, : 1 + num_top] for table in tables]),
        logprobs=np.concatenate([table.logprobs[:, : 1 + num_top] for table in tables]),
        ranks=np.concatenate([table.ranks for table in tables]),
    )
