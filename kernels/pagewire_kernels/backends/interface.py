"""What every attention backend offers."""

from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels.backends.abilities import Abilities
from pagewire_kernels.batch import AttentionMetadata


class AttentionBackend(Protocol):
    """Writes and reads a paged KV cache. Arguments are those of `pagewire_kernels.reference`."""

    @property
    def name(self) -> str:
        """What `--attention-backend` calls it."""
        ...

    @property
    def abilities(self) -> Abilities:
        """What it can do; a call that asks for more raises ValueError or TypeError."""
        ...

    def warm_up(self, dtype: torch.dtype) -> None:
        """Do now what the first call with a cache of `dtype` would have to do, such as compile."""
        ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Store each row's key and value in its slot."""
        ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        """Causal attention of flattened query rows over their sequences' cached blocks."""
        ...
