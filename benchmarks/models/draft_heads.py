"""Random heads of EAGLE-3, in the layout of their authors: their drafts are wrong, but cost what
those of a trained head cost."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def head_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of such a head; every third token or so is drafted."""
    generator = torch.Generator().manual_seed(seed)
    size, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    target_size = config.get("target_hidden_size", size)
    vocab_size, draft_vocab_size = config["vocab_size"], config["draft_vocab_size"]

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 0.2

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tokens = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[tokens] = True
    return {
        "fc.weight": matrix(size, 3 * target_size),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, queries),
        "midlayer.mlp.gate_proj.weight": matrix(inner, size),
        "midlayer.mlp.up_proj.weight": matrix(inner, size),
        "midlayer.mlp.down_proj.weight": matrix(size, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab_size, size),
        "d2t": tokens - torch.arange(draft_vocab_size),
        "t2d": is_drafted,
    }


def write_head(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a head to the directory `path`; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def head_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a head for a Llama model, which drafts a third of its vocabulary.
    target: the model's `config.json`."""
    same = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "vocab_size",
    )
    middle = target["num_hidden_layers"] // 2
    return {name: target[name] for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
        "draft_vocab_size": target["vocab_size"] // 3,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, middle, target["num_hidden_layers"] - 1],
    }
