"""Draft heads that checkpoints hold beside the layers of their model (multi-token prediction)."""

import re
from dataclasses import replace

from worker_service.models.decoder.specs import DecoderSettings, DraftHeadSpec, LayerSpec


def with_layer_behind(settings: DecoderSettings) -> DecoderSettings:
    """DeepSeek-V3's and GLM's head: a layer behind the last one, which is of the same kind."""
    name = f"model.layers.{settings.num_layers}"
    spec = DraftHeadSpec(
        layer=settings.layers[-1],
        layer_name=name,
        names={
            "embedding_norm": f"{name}.enorm",
            "hidden_norm": f"{name}.hnorm",
            "projection": f"{name}.eh_proj",
            "norm": f"{name}.shared_head.norm",
        },
        tensor_names=rf"{re.escape(name)}\..*",
        embedding_name=f"{name}.embed_tokens.weight",
        head_name=f"{name}.shared_head.head.weight",
    )
    return replace(settings, draft_head=spec)


def qwen_head(layer: LayerSpec) -> DraftHeadSpec:
    """The head of Qwen3-Next and Qwen3.5, a module of its own. layer: with attention."""
    return DraftHeadSpec(
        layer=layer,
        layer_name="mtp.layers.0",
        names={
            "embedding_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "projection": "mtp.fc",
            "norm": "mtp.norm",
        },
        tensor_names=r"mtp\.(?!layers\.[1-9]).*",
        embedding_name="mtp.embed_tokens.weight",
        head_name="mtp.lm_head.weight",
    )
