"""Log probabilities of sampled tokens, of prompt tokens, and of the candidates among which the core
chooses. They are those of the model's own distribution, before penalties and temperature.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.batch import AdapterRows
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
    """Log probabilities of the chosen token and of the most probable tokens of each row."""

    token_ids: npt.NDArray[np.int32]
    """[n, 1 + window]: the chosen token, then the most probable ones."""

    logprobs: npt.NDArray[np.float32]
    """[n, 1 + window]."""

    ranks: npt.NDArray[np.int32]
    """[n]: rank of the chosen token; 1 is the most probable one."""

    def row(self, index: int, num_top: int) -> TokenLogprobs:
        """The chosen token and the `num_top` most probable tokens of one row."""
        return TokenLogprobs(
            token_ids=self.token_ids[index, : 1 + num_top],
            logprobs=self.logprobs[index, : 1 + num_top],
            rank=int(self.ranks[index]),
        )


def logprob_table(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTable:
    """Compute the log softmax of the given tokens and of at least `num_top` most probable ones.

    logits: float32 [n, vocab_size]; token_ids: int64 [n]. The rank of a token is one more than the
    number of tokens with a higher probability.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top_ids, top = token_ids.new_empty((len(logits), 0)), logprobs[:, :0]
    if num_top > 0:
        top, top_ids = largest(logprobs, window(num_top, logprobs.shape[1]))
    ids = torch.cat([token_ids.unsqueeze(1), top_ids], dim=1)
    values = torch.cat([chosen, top], dim=1)
    return table_of(ids.cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy())


def table_of(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32], ranks: npt.NDArray[np.integer]
) -> LogprobTable:
    """Make a table, with the tokens after the first one in order of probability.

    ids, values: [n, 1 + window], the chosen token first, the others in any order; ranks: [n].
    """
    top_ids, top = _order(ids[:, 1:], values[:, 1:])
    return LogprobTable(
        np.concatenate([ids[:, :1], top_ids], axis=1).astype(np.int32),
        np.concatenate([values[:, :1], top], axis=1),
        ranks.astype(np.int32),
    )


def window(num_top: int, vocab_size: int) -> int:
    """The number of largest logits to examine for the `num_top` most probable tokens of a row."""
    return min(max(num_top, MIN_WINDOW), vocab_size)


def _order(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sort each row by decreasing value, and by token id among equals."""
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def to_logprobs(logits: Tensor, rows: Int64Array) -> None:
    """Replace the logits of these rows by log probabilities, in place, before edits are applied."""
    index = upload(rows, logits.device)
    logits[index] = torch.log_softmax(logits[index], dim=-1)


def offer(logprobs: Tensor, rows: Int64Array, counts: Int32Array) -> dict[int, Candidates]:
    """Return the most probable tokens that are not excluded, by row.

    Among equals the lowest ids come first, independently of other rows. logprobs: float32
    [n, vocab_size], minus infinity for excluded tokens; rows: [m]; counts: [m], maximum number of
    candidates of each of these rows.
    """
    index = upload(rows, logprobs.device)
    # One more than is returned, which shows whether the last one returned has equals.
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
    """Ids and log probabilities of all tokens of a row, most probable first, then by id."""
    values = logprobs.cpu().numpy()
    ids = np.argsort(-values, kind="stable")
    return ids, values[ids]


MAX_LOGITS_BYTES = 64 * 2**20
"""Maximum size of logits computed at once: those of all tokens of a long prompt would not fit into
memory."""


def prompt_logprobs(
    model: Model,
    hidden: Tensor,
    token_ids: Int32Array,
    start: int,
    num_top: int,
    adapters: Sequence[AdapterRows] = (),
) -> PromptLogprobs:
    """Compute log probabilities of consecutive prompt tokens, and of the most probable tokens.

    hidden: [num_tokens, hidden_size], the hidden states that predict the tokens; token_ids:
    [num_tokens], the tokens of the prompt; start: position of the first one; num_top: number of
    most probable tokens at each position; adapters: of all hidden states.
    """
    targets = upload(token_ids.astype("int64"), hidden.device)
    pieces = prompt_logits(model, hidden, targets, adapters)
    return of_prompt(start, num_top, [logprob_table(*piece, num_top) for piece in pieces])


def prompt_logits(
    model: Model, hidden: Tensor, targets: Tensor, adapters: Sequence[AdapterRows] = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits, targets) of consecutive tokens, in pieces of at most `MAX_LOGITS_BYTES`.

    hidden: [num_tokens, hidden_size]; targets: [num_tokens], the tokens that they predict;
    adapters: of all of them.
    """
    piece = max(1, MAX_LOGITS_BYTES // (4 * model.vocab_size))
    for part, target in zip(hidden.split(piece), targets.split(piece), strict=True):
        yield model.compute_logits(part, adapters), target


def of_prompt(start: int, num_top: int, tables: Sequence[LogprobTable]) -> PromptLogprobs:
    """Concatenate the tables of consecutive prompt tokens, the first at position `start`."""
    return PromptLogprobs(
        start=start,
        token_ids=np.concatenate([table.token_ids[:, : 1 + num_top] for table in tables]),
        logprobs=np.concatenate([table.logprobs[:, : 1 + num_top] for table in tables]),
        ranks=np.concatenate([table.ranks for table in tables]),
    )
