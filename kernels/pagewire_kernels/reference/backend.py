"""The reference as a backend."""

import torch

from pagewire_kernels import reference
from pagewire_kernels.interface import Abilities


class ReferenceBackend:
    """Plain torch, on any device; slow, since it takes sequence after sequence."""

    name = "reference"
    abilities = Abilities(devices=(), fp8_cache=True)
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Nothing to prepare."""
