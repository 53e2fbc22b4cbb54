"""LongRoPE (Ding et al. 2024) without a look at the batch."""

import logging
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)


def pin_long_rotary(model: Any, config: Any, max_model_len: int) -> None:
    """Choose LongRoPE's factors once: the long ones if sequences may exceed the trained length.

    `transformers` chooses at each forward pass by the longest sequence in the batch, which would
    make one request's tokens depend on another's, and throws a sequence's cache away when it grows
    past the trained length. Limit `max_model_len` to that length for the short factors.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        parameters = config.rope_parameters
        trained = int(parameters["original_max_position_embeddings"])
        initialise = ROPE_INIT_FUNCTIONS["longrope"]
        inv_freq, scaling = initialise(config, module.inv_freq.device, seq_len=max_model_len)
        module.inv_freq, module.attention_scaling = inv_freq, scaling
        module.rope_type = "pinned"  # no longer looked at the batch for
        kind = "long" if max_model_len > trained else "short"
        logger.info("rotary factors chosen kind=%s trained_length=%d", kind, trained)
