"""A model whose next token is a checksum of the whole context, read back from the KV cache.

It implements `worker_service.models.interface.Model`. It writes each token's id into the cache
where a real model writes keys and values, and reads its context from the cache through the block
tables. So any mistake in slots, blocks, positions or copies changes the tokens it picks, and
`next_token` says what is right from the tokens alone.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from pagewire_kernels.batch import AttentionMetadata, RowAdapters, StepBatch
from pagewire_kernels.interface import Computed
from pagewire_kernels.reference.backend import LayerKernels, ReferenceBackend
from pagewire_kernels.select import Kernels
from worker_service.config import ModelConfig
from worker_service.loader import LoadedModel
from worker_service.models.kv_cache_spec import KVCacheSpec

VOCAB_SIZE = 97


def next_token(token_ids: Sequence[int]) -> int:
    """The greedy token after these."""
    return sum((i + 1) * (token + 1) for i, token in enumerate(token_ids)) % VOCAB_SIZE


class CountingModel:
    """See the module's docstring. Token `poison` makes the logits of later rows NaN."""

    kv_cache_spec = KVCacheSpec.uniform(
        num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32
    )
    architecture = "CountingForCausalLM"
    vocab_size = VOCAB_SIZE
    num_parameters = 0

    def __init__(self, max_model_len: int = 256, poison: int | None = None) -> None:
        self.max_model_len = max_model_len
        self.poison = poison
        self.batches: list[tuple[int, int]] = []
        """(sequences, tokens) of each forward pass."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Checksums of each row's context, [num_tokens, 1]."""
        token_ids, [metadata], [(keys, _)] = batch.token_ids, batch.attention, batch.caches
        block_size = keys.shape[1]
        written = metadata.slot_mapping >= 0
        slots = metadata.slot_mapping[written]
        blocks, offsets = slots // block_size, slots % block_size
        keys[blocks, offsets, 0, 0] = token_ids[written].float()
        starts = metadata.query_start.tolist()
        self.batches.append((len(starts) - 1, len(token_ids)))
        rows = [
            self._context_sums(keys, metadata, seq, starts[seq + 1] - starts[seq])
            for seq in range(len(starts) - 1)
        ]
        rows.append(torch.full((len(token_ids) - starts[-1],), torch.nan))  # rows of no sequence
        return torch.cat(rows).unsqueeze(1)

    def forward_to_logits(self, batch: StepBatch) -> Computed:
        """As native models do; there are no logits yet."""
        return Computed(self.forward(batch))

    def compute_logits(
        self, hidden_states: torch.Tensor, adapters: RowAdapters = ()
    ) -> torch.Tensor:
        """Largest at the checksum, falling with the distance from it."""
        distance = (torch.arange(VOCAB_SIZE) - hidden_states) % VOCAB_SIZE
        return -0.125 * distance

    def _context_sums(
        self, keys: torch.Tensor, metadata: AttentionMetadata, seq: int, query_len: int
    ) -> torch.Tensor:
        length = int(metadata.context_lens[seq])
        if length == 0:  # a row that fills up a batch
            return torch.zeros(query_len)
        positions = torch.arange(length)
        block_size = keys.shape[1]
        blocks = metadata.block_tables[seq].long()[positions // block_size]
        context = keys[blocks, positions % block_size, 0, 0]
        sums = torch.cumsum((positions + 1) * (context.double() + 1), dim=0) % VOCAB_SIZE
        if self.poison is not None:
            sums[torch.cumsum(context == self.poison, dim=0) > 0] = torch.nan
        return sums[length - query_len :].float()


def loaded_counting_model(
    model: CountingModel | None = None, model_dir: Path = Path(), block_size: int = 4
) -> LoadedModel:
    """A counting model as the loader would hand it over."""
    return LoadedModel(
        model=model or CountingModel(),
        config=ModelConfig(
            model="counting", device="cpu", dtype="float32", attention_backend="reference"
        ),
        model_dir=model_dir,
        assets={},
        tokenizer=None,
        block_size=block_size,
        hf_config=None,
        eos_token_ids=(0,),
        bos_token_id=None,
        fingerprint="counting",
        weights="none",
        batch_invariant=True,
        kernels=Kernels(ReferenceBackend(), LayerKernels()),
    )
