"""Random texts whose queries, keys and values are packed without padding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import AttentionBackend


class PackedTexts:
    """Texts of some lengths. Queries, keys and values of a row are parts of one projection."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._device = torch.device(device)
        draw = torch.Generator().manual_seed(0)
        shape = sum(self._heads), head_dim
        self.texts = [
            torch.randn(length, *shape, generator=draw).to(self._device, dtype)
            for length in lengths
        ]
        """[length, heads of queries, keys and values, head_dim] each."""

    def random_bias(self, longest: int) -> Tensor:
        """A bias by distance for texts of up to `longest` rows."""
        draw = torch.Generator().manual_seed(1)
        bias = torch.randn(self._heads[0], 2 * longest - 1, generator=draw)
        return bias.to(self._device)

    def rows(self, batch: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the texts of a batch."""
        query, key, value = torch.cat([self.texts[i] for i in batch]).split(self._heads, dim=1)
        return query, key, value

    def attend(
        self,
        backend: AttentionBackend,
        batch: Sequence[int] | None = None,
        *,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The output of a backend for a batch of texts; None: all."""
        batch = range(len(self.texts)) if batch is None else batch
        metadata = AttentionMetadata.of_texts([len(self.texts[i]) for i in batch], self._device)
        rows = self.rows(batch)
        return backend.packed_attention(*rows, metadata, scale=scale, window=window, bias=bias)

    def attend_by_torch(
        self, *, scale: float, window: int | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """The output of torch's own attention for all texts, in float32."""
        outputs = []
        for text in self.texts:
            at = torch.arange(len(text), device=self._device)
            distance = at - at[:, None]
            mask = torch.zeros(self._heads[0], *distance.shape, device=self._device)
            if bias is not None:
                mask += bias[:, distance + bias.shape[1] // 2]
            if window is not None:
                mask[:, distance.abs() > window] = -torch.inf
            heads = text.float().transpose(0, 1).split(self._heads)
            attended = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=scale, enable_gqa=True
            )
            outputs.append(attended.transpose(0, 1))
        return torch.cat(outputs)
