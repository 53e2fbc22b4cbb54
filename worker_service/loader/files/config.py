"""The configuration of a model, `config.json`, and the tokens that begin and end its sequences."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_service.errors import BadCheckpoint
from worker_service.gguf.header import is_gguf
from worker_service.loader.files.json_files import read_json
from worker_service.loader.files.overrides import NO_OVERRIDES, Overrides
from worker_service.loader.gguf.config import gguf_config

logger = logging.getLogger(__name__)

_OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")
"""Keys of `config.json` that a multimodal model has for its text model as well."""


def read_config(model_dir: Path, overrides: Overrides = NO_OVERRIDES) -> dict[str, Any]:
    """Return the content of `config.json`, or its equivalent from the metadata of a GGUF file, with
    the keys that options replace.

    Raises BadCheckpoint or UnsupportedModel.
    """
    if is_gguf(model_dir):
        return overrides.of_config(gguf_config(model_dir))
    config = overrides.of_config(read_json(model_dir / "config.json"))
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise BadCheckpoint(f"{model_dir / 'config.json'} names no architecture")
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise BadCheckpoint(f"config.json: text_config: expected an object, got {text!r}")
    for holder in (config, text):
        _require_sizes(holder)
    # A multimodal model's keys of the same names may be those of another part.
    _require_types(text if text and names[0].endswith(_WHOLE_MODELS) else config)
    return _text_part(config)


_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("n_embd", "n_layer", "n_layers", "n_head", "n_heads", "dim", "d_model"),
)
_COUNTS = (
    *("_size", "_dim", "_rank", "_heads", "_layers", "_groups", "_experts", "_positions"),
    *("_max_length", "_topk", "_per_layer_input"),
)
"""Ends of the names of sizes and counts, of which there is none below 0 in any family."""
MAX_SIZE = 1 << 31
"""More than any size is."""


def _require_sizes(config: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint unless the sizes that all models have are positive, where they are
    given."""
    for key in _SIZES:
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 < value < MAX_SIZE):
            raise BadCheckpoint(f"config.json: {key}: expected a positive number, got {value!r}")


def _require_types(config: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint for other sizes that are no numbers, or below 0, kinds of layers that are
    no list, and activations that are no names, which some models leave out, or have as 0."""
    for key, value in config.items():
        if key.endswith(_COUNTS) and "window" not in key and type(value) is int and value < 0:
            raise BadCheckpoint(f"config.json: {key}: expected at least 0, got {value}")
    for key in ("head_dim", "global_head_dim", "qk_rope_head_dim", "max_position_embeddings"):
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 <= value < MAX_SIZE):
            raise BadCheckpoint(f"config.json: {key}: expected a number, got {value!r}")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list | None):
        raise BadCheckpoint(f"config.json: layer_types: expected a list, got {kinds!r}")
    for key in ("hidden_act", "hidden_activation"):
        value = config.get(key)
        if value is not None and not isinstance(value, str):
            raise BadCheckpoint(f"config.json: {key}: expected a name, got {value!r}")


_TEXT_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",  # positions of text are the same in all three axes
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots3_note_text": "Dots3NoteForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "apertus1p5_text": "Apertus1p5TextForCausalLM",
    "aria_text": "AriaTextForCausalLM",
    "cohere_compass_text": "CohereCompassForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "granite_docling_text": "GraniteForCausalLM",
    "hunyuan_vl_text": "HunYuanDenseV1ForCausalLM",
    "hy_v4_vl_text": "HYV4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "glm5_next_text": "Glm5NextForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
"""Text models of multimodal ones that can be served alone, by `model_type`."""

_WHOLE_MODELS = ("ForConditionalGeneration", "NemotronH_Omni_Reasoning_V3")
"""Ends of the names of multimodal models."""

_WITH_OTHER_KEYS = ("Step3p5ForCausalLM", "Dots3NoteForCausalLM")
"""Text models whose keys, as published, differ from those of `transformers`, which reads both."""

_TEXT_SETTINGS = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm_ocr_text": {"attention_bias": False},
}
"""What text models compute that their generator leaves to a key, which they do not have."""

WHOLE_MODEL = "whole_model"
"""The key of the multimodal model's class in the configuration of its text model."""


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a multimodal model's text model, if that can be served alone, with the
    keys of `transformers`; other configurations are returned unchanged."""
    whole, text = str(config["architectures"][0]), config.get("text_config") or {}
    if not whole.endswith((*_WHOLE_MODELS, *_WITH_OTHER_KEYS)):
        return config
    from transformers import AutoConfig  # which knows the defaults of absent keys

    try:
        read = AutoConfig.for_model(**copy.deepcopy(config))
    except (ValueError, TypeError, KeyError):
        return config  # which is refused by name
    except Exception as error:  # the library's own for values of another kind, by field
        raise BadCheckpoint(f"config.json: {' '.join(str(error).split())}") from error
    inner = read.get_text_config()
    name = _TEXT_MODELS.get(inner.model_type)
    if (inner is read and whole not in _WITH_OTHER_KEYS) or name is None:
        return config
    # The whole model's keys, as far as it has them, apply to its text model.
    outer = {key: config.get(key, text.get(key)) for key in _OF_BOTH}
    is_tied = getattr(read, "tie_word_embeddings", None)  # which some keep in the text model
    is_tied = getattr(inner, "tie_word_embeddings", False) if is_tied is None else is_tied
    tied = {"tie_word_embeddings": is_tied}
    fixed = _TEXT_SETTINGS.get(inner.model_type, {})
    if inner.model_type.startswith("glm") and not getattr(inner, "head_dim", None):
        fixed = {**fixed, "head_dim": inner.hidden_size // inner.num_attention_heads}
    names = {"architectures": [name], **({} if inner is read else {WHOLE_MODEL: whole})}
    return {**inner.to_dict(), **outer, **tied, **fixed, **names}


def special_tokens(
    model_dir: Path, config: Mapping[str, Any]
) -> tuple[tuple[int, ...], int | None]:
    """Return the ids of the tokens that end a sequence, and of the one that begins it, if any.

    `generation_config.json` takes precedence over `config.json`. What is no id of a token is logged
    and ignored.
    """
    generation_file = model_dir / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    inner = config.get("text_config") or {}
    num_tokens = config.get("vocab_size") or inner.get("vocab_size") or MAX_SIZE

    def ids(key: str) -> list[int]:
        value = next((h[key] for h in (generation, config, inner) if h.get(key) is not None), None)
        given = value if isinstance(value, list) else [] if value is None else [value]
        found = [token for token in given if type(token) is int and 0 <= token < num_tokens]
        if len(found) < len(given):
            logger.warning(
                "%s: expected ids of the vocabulary's %d tokens, others are not used: %r",
                *(key, num_tokens, value),
            )
        return found

    eos_ids, bos_ids = ids("eos_token_id"), ids("bos_token_id")
    return tuple(dict.fromkeys(eos_ids)), bos_ids[0] if bos_ids else None
