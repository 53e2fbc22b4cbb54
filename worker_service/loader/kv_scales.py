"""Scales of keys and values in an fp8 cache, where a checkpoint has them.

Quantisation tools measure per layer how large keys and values get and store one number for each,
`self_attn.k_scale` and `self_attn.v_scale`, or the same below `k_proj` and `v_proj`. Without them
the scale is 1, which suits models whose keys and values stay well below 448.
"""

import logging

from worker_service.errors import BadCheckpoint
from worker_service.loader.weights import Checkpoint, read_tensor
from worker_service.models.native import NativeModel

logger = logging.getLogger(__name__)


def load_kv_scales(model: NativeModel, checkpoint: Checkpoint) -> None:
    """Set each layer's scales. Raises BadCheckpoint for one that is not a positive number."""
    sources = {model.canonical_name(name): name for name in checkpoint.file_of}
    num_found = num_layers = 0
    for name, attention in model.kv_scale_holders():
        num_layers += 1
        for part, attribute in (("k", "key_scale"), ("v", "value_scale")):
            names = (f"{name}.{part}_scale", f"{name}.{part}_proj.{part}_scale")
            found = [sources[each] for each in names if each in sources]
            if found:
                setattr(attention, attribute, _read(checkpoint, found[0]))
                num_found += 1
    logger.info("kv scales num_layers=%d num_found=%d others=1.0", num_layers, num_found)


def _read(checkpoint: Checkpoint, name: str) -> float:
    tensor = read_tensor(checkpoint, name)
    scale = float(tensor) if tensor.numel() == 1 else 0.0
    if not 0.0 < scale < float("inf"):
        raise BadCheckpoint(f"{name}: expected one positive number, got {tensor.tolist()}")
    return scale
