"""From the host to where logits are."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The values on a device, without waiting for it: a GPU fetches them by way of pinned memory.

    On a CPU they are not copied.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
