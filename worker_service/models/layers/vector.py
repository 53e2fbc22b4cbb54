"""Numbers of a layer that belong to no linear layer and no norm."""

from collections.abc import Iterator

import torch

from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget


class Vector:
    """Float32 numbers of a layer that belong to no linear layer and no norm."""

    def __init__(
        self, shard: Shard, context: ModelContext, *, axes_before: int = 0, axes_after: int = 0
    ) -> None:
        """shard: this rank's numbers; axes_before, axes_after: axes of size 1 that their tensor has
        in the checkpoint."""
        self.numbers = torch.empty(shard.size, dtype=torch.float32, device=context.device)
        self._shard, self._axis = shard, axes_before
        self._shape = (*[1] * axes_before, shard.size, *[1] * axes_after)

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destination of the tensor with this name."""
        (name,) = names
        yield WeightTarget(name, self.numbers.view(self._shape), self._axis, self._shard)
