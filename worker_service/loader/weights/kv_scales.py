"""Scales of an fp8 KV cache.

Quantization tools measure the range of keys and values per layer and store one scale for each,
`self_attn.k_scale` and `self_attn.v_scale`, or the same below `k_proj` and `v_proj`. The default is
1, which suits models whose keys and values stay well below 448.
"""

import logging

from worker_service.errors import BadCheckpoint
from worker_service.loader.tensors import CheckpointTensor
from worker_service.loader.weights.checkpoint import Checkpoint, listed
from worker_service.models.native import NativeModel

logger = logging.getLogger(__name__)


def load_kv_scales(model: NativeModel, checkpoint: Checkpoint) -> None:
    """Set the KV scales of each layer. Raises BadCheckpoint if one is not a positive number."""
    sources = checkpoint.sources(model)
    num_found = num_layers = 0
    for name, attention in model.kv_scale_holders():
        num_layers += 1
        for part, attribute in (("k", "key_scale"), ("v", "value_scale")):
            names = (f"{name}.{part}_scale", f"{name}.{part}_proj.{part}_scale")
            found = [sources[target_name] for target_name in names if target_name in sources]
            if found:
                setattr(attention, attribute, _read_scale(found[0]))
                num_found += 1
    logger.info("kv scales num_layers=%d num_found=%d others=1.0", num_layers, num_found)


def _read_scale(stored: CheckpointTensor) -> float:
    tensor = stored[...]
    scale = float(tensor) if tensor.numel() == 1 else 0.0
    if not 0.0 < scale < float("inf"):
        raise BadCheckpoint(
            f"{stored.file}: {stored.name}: expected one positive number, got"
            f" {listed([str(number) for number in tensor.flatten().tolist()])}"
        )
    return scale
