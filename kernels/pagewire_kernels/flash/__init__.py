"""FlashAttention over the paged cache, by whichever package has it.

calls.py    one class per package, from our arguments to its own
backend.py  `FlashBackend`: the `flash` attention backend over one of them

The layer views of a block-major cache, `[num_blocks, block_size, num_kv_heads, head_dim]` with a
block stride of all layers, are what these packages call a paged cache; nothing is copied.
"""

from pagewire_kernels.flash.backend import FlashBackend
from pagewire_kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    FlashCall,
    TorchVarlen,
    installed_calls,
)

__all__ = [
    "FlashAttention2",
    "FlashAttention3",
    "FlashBackend",
    "FlashCall",
    "TorchVarlen",
    "installed_calls",
]
