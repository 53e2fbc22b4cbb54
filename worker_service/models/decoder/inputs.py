"""What a decoder makes of the rows of its embedding before the first layer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.models.decoder.specs import DecoderSettings
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers.norms import LayerNorm, RMSNorm, norm_targets
from worker_service.models.linear.linear import Linear
from worker_service.models.native import ActivatesAdapters


class InputParts(nn.Module):
    """A factor, the embeddings that adapters have in place of those of tokens, a projection,
    positions and a norm, in this order; empty on later stages."""

    def __init__(self, settings: DecoderSettings, context: ModelContext, kernels: Kernels) -> None:
        super().__init__()
        s = settings
        self.scale = torch.tensor(s.embedding_scale, dtype=context.dtype).item()
        has_none = s.per_layer is not None or s.scales_virtual_tokens is None
        self.virtual_token_size = None if has_none else s.embedding_size
        self.projection: Linear | None = None
        self.positions: Tensor | None = None
        """[num_positions, hidden_size], with `position_offset` rows before them."""
        self._position_offset = s.position_offset or 0
        self.norm: RMSNorm | LayerNorm | None = None
        self._kernels = kernels.layers
        if not context.communicator.layout.is_first_stage:
            return
        if s.embedding_size != s.hidden_size:
            size, inner = Shard.full(s.embedding_size), Shard.full(s.hidden_size)
            self.projection = Linear(size, [inner], bias=False, context=context)
        if s.position_offset is not None:
            num_positions = s.max_model_len + s.position_offset
            self.positions = context.empty(num_positions, s.hidden_size)
        if s.embedding_norm is not None:
            self.norm = s.embedding_norm.build(s.hidden_size, context, kernels)

    def forward(self, x: Tensor, batch: StepBatch, adapters: ActivatesAdapters | None) -> Tensor:
        """x: [num_tokens, embedding_size]; returns [num_tokens, hidden_size]."""
        if self.scale != 1.0:
            x = self._kernels.scale(x, self.scale)
        if batch.has_virtual_tokens and adapters is not None:
            x = adapters.put_prompts(x, batch)
        if self.projection is not None:
            x = self.projection(x)
        if self.positions is not None:
            x = self._kernels.embed(self.positions[self._position_offset :], batch.positions, x)
        return x if self.norm is None else self.norm(x)

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors."""
        if self.projection is not None:
            yield from self.projection.targets("model.project_in")
        if self.positions is not None:
            yield WeightTarget("model.embed_positions.weight", self.positions)
        if self.norm is not None:
            yield from norm_targets("model.embedding_norm", self.norm)
