"""Drives a model over a paged cache as the engine does: shuffled blocks, chunks, batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, StepBatch
from tests.support.paged_batch import unwritten
from worker_service.models.interface import Model


class PagedDriver:
    """Keeps sequences' block tables over one cache and runs batches of their tokens."""

    def __init__(
        self,
        model: Model,
        *,
        max_tokens: int = 128,
        max_seqs: int = 8,
        block_size: int = 8,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self._block_size = block_size
        spec = model.kv_cache_spec
        per_sequence = -(-max_tokens // block_size)
        num_blocks = per_sequence * max_seqs
        shape = (num_blocks, *spec.block_shape(block_size))
        self._device = torch.device(device)
        self.kv_cache = unwritten(shape, spec.dtype).to(self._device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self._tables = order.view(max_seqs, per_sequence)

    def run(self, batch: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Compute tokens of sequences: (sequence, position of the first, tokens). Returns the
        logits of each part's rows, [num_tokens, vocab_size]."""
        lengths = [len(tokens) for _, _, tokens in batch]
        positions = [torch.arange(start, start + len(tokens)) for _, start, tokens in batch]
        tables = self._tables[[sequence for sequence, _, _ in batch]]
        slots = [
            table[where // self._block_size] * self._block_size + where % self._block_size
            for table, where in zip(tables, positions, strict=True)
        ]
        context_lens = [start + len(tokens) for _, start, tokens in batch]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *lengths]).cumsum(0).int().to(self._device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32).to(self._device),
            block_tables=tables.int().contiguous().to(self._device),
            slot_mapping=torch.cat(slots).to(self._device),
            max_query_len=max(lengths),
            max_context_len=max(context_lens),
        )
        token_ids = torch.tensor([token for _, _, tokens in batch for token in tokens])
        hidden = self.model.forward(
            StepBatch(
                token_ids=token_ids.to(self._device),
                positions=torch.cat(positions).to(self._device),
                attention=(metadata,),
                caches=self.model.kv_cache_spec.by_layer(self.kv_cache),
            )
        )
        return list(self.model.compute_logits(hidden).cpu().split(lengths))

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int | None = None
    ) -> list[list[int]]:
        """Greedy continuations of several prompts in one batch, prefilled in chunks or at once."""
        sequences = [list(prompt) for prompt in prompts]
        last = self._prefill(sequences, chunk)
        outputs: list[list[int]] = [[] for _ in sequences]
        for step in range(num_tokens):
            for output, sequence, logits in zip(outputs, sequences, last, strict=True):
                output.append(int(logits.argmax()))
                sequence.append(output[-1])
            if step + 1 < num_tokens:
                batch = [(i, len(s) - 1, s[-1:]) for i, s in enumerate(sequences)]
                last = [logits[-1] for logits in self.run(batch)]
        return outputs

    def _prefill(self, sequences: Sequence[list[int]], chunk: int | None) -> list[Tensor]:
        """Last logits of each sequence."""
        size = chunk or max(len(sequence) for sequence in sequences)
        last: list[Tensor] = [torch.empty(0)] * len(sequences)
        for start in range(0, max(len(sequence) for sequence in sequences), size):
            parts = [
                (i, s[start : start + size]) for i, s in enumerate(sequences) if start < len(s)
            ]
            logits = self.run([(i, start, tokens) for i, tokens in parts])
            for (i, _), part in zip(parts, logits, strict=True):
                last[i] = part[-1]
        return last
