"""One interface over the attention implementations, and the choice between them.

interface.py   `AttentionBackend`, what every implementation offers
abilities.py   what each can do, as data, and what a model needs
reference.py   `ReferenceBackend`
select.py      from a device, a name and a model's needs to a backend
kernels.py     `Kernels`, a backend and the layer kernels beside it
self_check.py  a small case, run on the device before a GPU backend is trusted
"""

from pagewire_kernels.backends.abilities import Abilities, AttentionNeeds
from pagewire_kernels.backends.interface import AttentionBackend
from pagewire_kernels.backends.kernels import ForwardFn, Kernels, select_kernels
from pagewire_kernels.reference.backend import ReferenceBackend
from pagewire_kernels.select import BACKEND_NAMES, select_backend

__all__ = [
    "BACKEND_NAMES",
    "Abilities",
    "AttentionBackend",
    "AttentionNeeds",
    "ForwardFn",
    "Kernels",
    "ReferenceBackend",
    "select_backend",
    "select_kernels",
]
