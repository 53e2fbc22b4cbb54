"""The forward pass of a step that is computed at once: operation by operation, or on a CPU as one
recorded program."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire_kernels.batch import LayerMemory, StepBatch
from pagewire_kernels.interface import Computed
from worker_service.models.interface import ComputesLogits, Model
from worker_service.runner.batch.inputs import build_batch, lay_out, whole_texts
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.sampler import Largest


class ForwardPass(NamedTuple):
    """What a forward pass has computed; valid until the next one."""

    hidden: Tensor
    """[num_tokens, hidden_size]."""

    captured: tuple[Tensor, ...]
    """Hidden states between the model's layers; see `Computed`."""

    logits: Tensor | None
    """float32 [num_sampling, vocab_size]; None if no row samples, or this rank has no LM head."""

    largest: Largest | None
    """The largest logit of each row, if that was computed, too."""


def forward_of(model: Model) -> Callable[[StepBatch], Computed]:
    """The forward pass of a model, with what it captures and computes of logits, if it does."""
    if isinstance(model, ComputesLogits):
        return model.forward_to_logits

    def forward(batch: StepBatch) -> Computed:
        return Computed(model.forward(batch))

    return forward


class HostForward:
    """Runs a model over one cache. Inputs are built on the host."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerMemory],
        device: torch.device,
        *,
        with_logits: bool = True,
    ) -> None:
        """caches: of the model's layers, on its device; with_logits: whether this rank has the LM
        head."""
        self._model = model
        self._caches = caches
        self._device = device
        self._with_logits = with_logits
        self._compute = forward_of(model)

    def run(self, rows: StepRows, table: SequenceTable) -> ForwardPass | None:
        """Compute the rows that have something to compute; None if there are none."""
        computes, states = rows.computes, rows.last_states()
        if not computes.any():
            return None
        row_ids, firsts = rows.row_ids[computes], rows.firsts[computes]
        num_tokens = rows.num_tokens[computes]
        inputs = lay_out(row_ids, firsts, num_tokens, table, rows.saved_states)
        # A fork samples from its parent's last state, which is then named twice.
        if inputs.token_types is not None:
            batch = whole_texts(inputs, self._device)
        else:
            sampled = states if len(states) else None
            batch = build_batch(inputs, table, self._caches, sampled)
        hidden, head, captured = self._compute(batch)
        if head is not None:
            largest = Largest(head.best.numpy(), head.largest.numpy())
            return ForwardPass(hidden, captured, head.logits, largest)
        if batch.sampled is None or not self._with_logits:
            return ForwardPass(hidden, captured, None, None)
        is_all = len(states) == len(hidden) and not len(rows.forks)
        chosen = hidden if is_all else hidden[batch.sampled]
        logits = self._model.compute_logits(chosen, batch.sampled_adapters())
        return ForwardPass(hidden, captured, logits, None)
