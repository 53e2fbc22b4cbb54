"""A trial run of a loaded model, which checks its results and not only that it runs."""

import logging
from itertools import pairwise

import torch
from torch import Tensor

from worker_service.errors import UnsupportedModel
from worker_service.models.interface import Model

logger = logging.getLogger(__name__)

_LENGTH = 21
_OTHER_LENGTH = 34
_CHUNK = 13
_TOLERANCE = 0.1
"""Relative to a row's norm. Rounding in half precision stays below it; a model that ignores the
given positions exceeds it by far."""


@torch.inference_mode()
def try_model(model: Model, device: torch.device, block_size: int) -> bool:
    """Return whether the logits of a row are bitwise independent of batch and chunking.

    One sequence is computed as a single prefill in a batch with another sequence, and again alone,
    as two prefill chunks and one decode; a model without a cache computes it at once. This also
    warms up threads and kernels. Hidden states are compared at all positions, logits only at both
    sides of each cut, because the logits of a large vocabulary take much memory. block_size: tokens
    per KV block.

    Returns False, with a warning in the log, if a logit is NaN or infinite. Raises UnsupportedModel
    if the two computations differ by more than rounding: then the model ignores the positions that
    it is given, or a row attends to other sequences.
    """
    length = min(_LENGTH, model.max_model_len)
    trial = _Trial(model, device, block_size, [length, min(_OTHER_LENGTH, model.max_model_len)])
    # The other sequence comes first, so that places in the batch are not positions.
    together = trial.run([(1, 0, trial.lengths[1]), (0, 0, length)])[-length:]
    cuts = sorted({0, min(_CHUNK, length - 1), length - 1, length})
    cuts = cuts if model.kv_cache_spec.layers else [0, length]
    alone = torch.cat([trial.run([(0, *cut)]) for cut in pairwise(cuts)])
    rows = sorted(
        {position for end in cuts[1:] for position in (end - 1, end) if position < length}
    )
    logits = model.compute_logits(together[rows])
    logits_alone = torch.cat([model.compute_logits(alone[row : row + 1]) for row in rows])
    if not bool(logits.isfinite().all()):
        logger.warning(
            "logits of the trial run are NaN or infinite: weights may be, or may exceed the range"
            " of the dtype architecture=%s",
            model.architecture,
        )
        return False
    errors = (logits_alone - logits).norm(dim=1) / logits.norm(dim=1).clamp(min=1e-9)
    if bool(errors.median() > _TOLERANCE):
        raise UnsupportedModel(
            f"{model.architecture} cannot be served: a sequence computed in chunks has other"
            " logits than the same sequence computed at once"
        )
    return torch.equal(alone, together) and torch.equal(logits_alone, logits)


class _Trial:
    """Sequences of random tokens over a small KV cache."""

    def __init__(
        self, model: Model, device: torch.device, block_size: int, lengths: list[int]
    ) -> None:
        self._model = model
        self._device = device
        self.lengths = lengths
        spec = model.kv_cache_spec
        self._block_size = block_size
        widths = [group.table_width(max(lengths)) for group in spec.groups(block_size)]
        counts = [len(lengths) * width for width in widths]
        self._tables = [
            blocks.view(len(lengths), -1) for blocks in torch.arange(sum(counts)).split(counts)
        ]
        """By cache group: [num_seqs, max_blocks]."""
        pool_shape = sum(counts) + 1, spec.block_bytes(block_size)
        pool = torch.zeros(pool_shape, dtype=torch.uint8, device=device)
        self._caches = spec.views(pool, block_size)
        generator = torch.Generator().manual_seed(0)
        self._tokens = [
            torch.randint(model.vocab_size, (length,), generator=generator) for length in lengths
        ]

    def run(self, parts: list[tuple[int, int, int]]) -> Tensor:
        """Compute a batch of (sequence, first position, end). Returns hidden states [num_tokens,
        hidden_size]."""
        sequences = [sequence for sequence, *_ in parts]
        tokens = torch.cat([self._tokens[sequence][start:end] for sequence, start, end in parts])
        batch = self._model.kv_cache_spec.batch_of_ranges(
            tokens.to(self._device),
            [(start, end) for _, start, end in parts],
            [tables[sequences].int().to(self._device) for tables in self._tables],
            self._caches,
            self._block_size,
        )
        return self._model.forward(batch).clone()  # the next run may overwrite it
