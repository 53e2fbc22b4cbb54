"""GGUF files made from tiny checkpoints, beside checkpoints with the same dequantized weights."""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from scheduler_service.frontend.models.tokenizer import ModelTokenizer
from tests.support.checkpoints import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    make_checkpoint,
)

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Offsets of the float16 numbers in blocks of types that the library only dequantizes."""

_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MistralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "FalconH1ForCausalLM": ("falcon-h1", gguf.MODEL_ARCH.FALCON_H1),
    "FalconMambaForCausalLM": ("mamba", gguf.MODEL_ARCH.MAMBA),
    "Gemma2ForCausalLM": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "Gemma3ForCausalLM": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "Gemma3nForCausalLM": ("gemma3n", gguf.MODEL_ARCH.GEMMA3N),
    "Gemma4ForCausalLM": ("gemma4", gguf.MODEL_ARCH.GEMMA4),
    "Llama4ForCausalLM": ("llama4", gguf.MODEL_ARCH.LLAMA4),
    "Ministral3ForCausalLM": ("mistral3", gguf.MODEL_ARCH.MISTRAL3),
    "Mistral4ForCausalLM": ("mistral4", gguf.MODEL_ARCH.MISTRAL4),
    "Phi3ForCausalLM": ("phi3", gguf.MODEL_ARCH.PHI3),
    "MixtralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2MoeForCausalLM": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "Qwen3MoeForCausalLM": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "Qwen3NextForCausalLM": ("qwen3next", gguf.MODEL_ARCH.QWEN3NEXT),
    "Qwen3_5ForCausalLM": ("qwen35", gguf.MODEL_ARCH.QWEN35),
    "Qwen3_5MoeForCausalLM": ("qwen35moe", gguf.MODEL_ARCH.QWEN35MOE),
    "GptOssForCausalLM": ("gpt-oss", gguf.MODEL_ARCH.GPT_OSS),
    "GemmaForCausalLM": ("gemma", gguf.MODEL_ARCH.GEMMA),
    "ArceeForCausalLM": ("arcee", gguf.MODEL_ARCH.ARCEE),
    "OlmoeForCausalLM": ("olmoe", gguf.MODEL_ARCH.OLMOE),
    "Dots1ForCausalLM": ("dots1", gguf.MODEL_ARCH.DOTS1),
    "CohereForCausalLM": ("command-r", gguf.MODEL_ARCH.COMMAND_R),
    "Cohere2ForCausalLM": ("cohere2", gguf.MODEL_ARCH.COHERE2),
    "DeepseekV2ForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "DeepseekV3ForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "YoutuForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "HunYuanDenseV1ForCausalLM": ("hunyuan-dense", gguf.MODEL_ARCH.HUNYUAN_DENSE),
    "HunYuanMoEV1ForCausalLM": ("hunyuan-moe", gguf.MODEL_ARCH.HUNYUAN_MOE),
    "Ernie4_5ForCausalLM": ("ernie4_5", gguf.MODEL_ARCH.ERNIE4_5),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5-moe", gguf.MODEL_ARCH.ERNIE4_5_MOE),
    "Exaone4ForCausalLM": ("exaone4", gguf.MODEL_ARCH.EXAONE4),
    "Glm4ForCausalLM": ("glm4", gguf.MODEL_ARCH.GLM4),
    "Glm4MoeForCausalLM": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
    "GraniteForCausalLM": ("granite", gguf.MODEL_ARCH.GRANITE),
    "GraniteMoeForCausalLM": ("granitemoe", gguf.MODEL_ARCH.GRANITE_MOE),
    "GraniteMoeHybridForCausalLM": ("granitehybrid", gguf.MODEL_ARCH.GRANITE_HYBRID),
    "JambaForCausalLM": ("jamba", gguf.MODEL_ARCH.JAMBA),
    "KimiLinearForCausalLM": ("kimi-linear", gguf.MODEL_ARCH.KIMI_LINEAR),
    "Lfm2ForCausalLM": ("lfm2", gguf.MODEL_ARCH.LFM2),
    "Lfm2MoeForCausalLM": ("lfm2moe", gguf.MODEL_ARCH.LFM2MOE),
    "MambaForCausalLM": ("mamba", gguf.MODEL_ARCH.MAMBA),
    "Mamba2ForCausalLM": ("mamba2", gguf.MODEL_ARCH.MAMBA2),
    "MiniMaxM2ForCausalLM": ("minimax-m2", gguf.MODEL_ARCH.MINIMAXM2),
    "NemotronHForCausalLM": ("nemotron_h", gguf.MODEL_ARCH.NEMOTRON_H),
    "Olmo2ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "Olmo3ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "PhimoeForCausalLM": ("phimoe", gguf.MODEL_ARCH.PHIMOE),
    "SeedOssForCausalLM": ("seed_oss", gguf.MODEL_ARCH.SEED_OSS),
    "SmolLM3ForCausalLM": ("smollm3", gguf.MODEL_ARCH.SMOLLM3),
    "SolarOpenForCausalLM": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
    "HYV3ForCausalLM": ("hy_v3", gguf.MODEL_ARCH.DOTS1),
    "Cohere2MoeForCausalLM": ("cohere2moe", gguf.MODEL_ARCH.DOTS1),
    "MellumForCausalLM": ("mellum", gguf.MODEL_ARCH.QWEN3MOE),
    "AfmoeForCausalLM": ("afmoe", gguf.MODEL_ARCH.AFMOE),
    "ExaoneMoeForCausalLM": ("exaone-moe", gguf.MODEL_ARCH.EXAONE_MOE),
    "MiMoV2FlashForCausalLM": ("mimo2", gguf.MODEL_ARCH.MIMO2),
    "MiniCPM3ForCausalLM": ("minicpm3", gguf.MODEL_ARCH.MINICPM3),
    "DeepseekV32ForCausalLM": ("deepseek32", gguf.MODEL_ARCH.GLM_DSA),
    "GlmMoeDsaForCausalLM": ("glm-dsa", gguf.MODEL_ARCH.GLM_DSA),
    "ApertusForCausalLM": ("apertus", gguf.MODEL_ARCH.APERTUS),
    "OlmoForCausalLM": ("olmo", gguf.MODEL_ARCH.OLMO),
    "PhiForCausalLM": ("phi2", gguf.MODEL_ARCH.PHI2),
    "Starcoder2ForCausalLM": ("starcoder2", gguf.MODEL_ARCH.STARCODER2),
    "StableLmForCausalLM": ("stablelm", gguf.MODEL_ARCH.STABLELM),
    "NemotronForCausalLM": ("nemotron", gguf.MODEL_ARCH.NEMOTRON),
    "Jais2ForCausalLM": ("jais2", gguf.MODEL_ARCH.JAIS2),
    "GPTNeoXForCausalLM": ("gptneox", gguf.MODEL_ARCH.GPTNEOX),
    "FalconForCausalLM": ("falcon", gguf.MODEL_ARCH.FALCON),
    "GPT2LMHeadModel": ("gpt2", gguf.MODEL_ARCH.GPT2),
    "GPTBigCodeForCausalLM": ("starcoder", gguf.MODEL_ARCH.STARCODER),
    "BloomForCausalLM": ("bloom", gguf.MODEL_ARCH.BLOOM),
    "MptForCausalLM": ("mpt", gguf.MODEL_ARCH.MPT),
}

_OTHER_ARCHITECTURES = {
    "gemma3_embedding": ("gemma-embedding", gguf.MODEL_ARCH.GEMMA_EMBEDDING),
    "llama_exaone": ("exaone", gguf.MODEL_ARCH.EXAONE),
    "llama_internlm": ("internlm2", gguf.MODEL_ARCH.INTERNLM2),
    "granite_minicpm": ("minicpm", gguf.MODEL_ARCH.MINICPM),
    "granite_minicpm_long": ("minicpm", gguf.MODEL_ARCH.MINICPM),
    "qwen2_vl": ("qwen2vl", gguf.MODEL_ARCH.QWEN2VL),
    "qwen3_vl": ("qwen3vl", gguf.MODEL_ARCH.QWEN3VL),
    "qwen3_moe_vl": ("qwen3vlmoe", gguf.MODEL_ARCH.QWEN3VLMOE),
    "mistral4_large": ("deepseek2", gguf.MODEL_ARCH.MISTRAL4),
}
"""Of files of models that compute the same as another one."""

_PAIRS_ROTATED = (
    *("llama", "granite", "granitemoe", "granitehybrid", "mistral3", "nemotron_h"),
    *("nemotron_h_moe", "smollm3", "arcee", "olmo", "minicpm", "internlm2"),
)
"""Architectures whose converter permutes queries and keys."""

_GROUPS_JOINED = ("bloom", "falcon", "gptneox")
"""Architectures whose converter puts queries, keys and values of all heads one after the other."""

_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")

_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
_GEMMA4 = {"head_dim": 64, "global_head_dim": 128, "final_logit_softcapping": 3.0}
_LLAMA4 = {
    "head_dim": 64,
    "num_hidden_layers": 5,
    "attention_chunk_size": 8192,  # files do not have it
    "no_rope_layer_interval": 4,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 512,
}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 3}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + number / 64 for number in range(32)],
    "long_factor": [2.0 + number / 8 for number in range(32)],
}
_LATENT = {
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
}
_MINICPM3 = {  # files do not have these factors
    **_LATENT,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "attention_bias": False,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "shared_intermediate_size": 512}
_MAMBA1 = ("mamba", "falcon_mamba", "jamba")
_NEMOTRON = {
    "mamba_head_dim": 64,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
}
_DENSE_MLP = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj)")
"""As `transformers` writes Kimi Linear, and published checkpoints do not."""

_DELTA = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "deepseek_v2_expanded": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v3_yarn": {
        **_LATENT,
        "attention_bias": False,
        "rope_interleave": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v32": {**_LATENT, "index_head_dim": 64},
    "glm_moe_dsa": {**_LATENT, "index_head_dim": 64, "indexer_types": ["full", "full"]},
    "youtu": _LATENT,
    "minicpm3": _MINICPM3,
    "minicpm3_long": {
        **_MINICPM3,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": MAX_POSITIONS,
            "short_factor": [1.0 + number / 8 for number in range(8)],
            "long_factor": [2.0 + number for number in range(8)],
        },
    },
    "afmoe": {"head_dim": 64, "moe_intermediate_size": 256},
    "solar_open": {"head_dim": 64, "moe_intermediate_size": 256, "first_k_dense_replace": 0},
    "hy_v3": {"head_dim": 64, "moe_intermediate_size": 256, "num_shared_experts": 2},
    "mellum": {"head_dim": 64, "moe_intermediate_size": 256, "mlp_layer_types": None},
    "cohere2_moe": {"head_dim": 64, "prefix_dense_intermediate_size": 512},
    "llama_internlm": {"head_dim": 64},
    "exaone_moe": {"moe_intermediate_size": 256},
    "mimo_v2_flash": {
        "head_dim": 96,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1 / 3}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 2e4))
        },
    },
    "ministral3": {
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    **dict.fromkeys(("mistral4", "mistral4_large"), _LATENT),
    "hunyuan_dense": {"head_dim": 64},
    "hunyuan_alpha": {"head_dim": 64},
    "hunyuan_moe": {"head_dim": 64, "moe_topk": 2},
    "llama": {"head_dim": 64},
    "gemma": {"head_dim": 64, "tie_word_embeddings": True},
    "olmoe": {"norm_topk_prob": False},  # files do not have it
    "dots1": {"moe_intermediate_size": 256, "sliding_window": None, "layer_types": None},
    "qwen3": {"head_dim": 64},
    "gemma2": {**_GEMMA, "num_hidden_layers": 4},
    "gemma3": {**_GEMMA, "num_hidden_layers": 7, "layer_types": None},
    "gemma3_embedding": {
        **_GEMMA,
        "num_hidden_layers": 7,
        "layer_types": None,
        "sliding_window": 8,
        "use_bidirectional_attention": True,
    },
    "gemma3n": {"head_dim": 64, "hidden_size_per_layer_input": 32, "laurel_rank": 32},
    "gemma4_shared": {**_GEMMA4, "hidden_size_per_layer_input": 32},
    "gemma4_plain": _GEMMA4,
    "gemma4_moe": {**_GEMMA4, "moe_intermediate_size": 256},
    "llama4": {
        **_LLAMA4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "phi3_long": {
        "rope_parameters": _LONG,
        "original_max_position_embeddings": 16,
        "sliding_window": None,
    },
    "phimoe": {"router_jitter_noise": 0.01},  # files do not have it
    "phimoe_long": {
        "rope_parameters": {
            **_LONG,
            "long_factor": _LONG["short_factor"],  # of which transformers use no other
            "short_mscale": 2**0.5,
            "long_mscale": 2**0.5,
        },
        "original_max_position_embeddings": 16,
        "router_jitter_noise": 0.01,
    },
    "phi3_partial": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "granite_minicpm": {"attention_multiplier": 0.125},  # files do not have it
    "starcoder2": {"sliding_window": None},  # likewise
    "gpt2": {"scale_attn_by_inverse_layer_idx": False, "n_embd": 256},
    "gpt_bigcode": {"n_inner": None, "n_embd": 256},
    "falcon": {"ffn_hidden_size": None},
    "falcon_groups": {"bias": False, "num_ln_in_parallel_attn": 1},
    "falcon_groups_large": {"bias": False, "num_ln_in_parallel_attn": 2},
    "granite_minicpm_long": {
        "attention_multiplier": 0.125,
        "rope_parameters": {**_LONG, "original_max_position_embeddings": MAX_POSITIONS},
    },
    "bloom": {"seq_length": MAX_POSITIONS},
    "mpt": {"d_model": 256},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 512},
    "gpt_oss": {"head_dim": 64},
    "cohere2": {"num_hidden_layers": 4, "layer_types": None},
    "ernie4_5": {"head_dim": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 256},
    "glm4": {"head_dim": 64},
    "glm4_vl": {"head_dim": 64, "attention_bias": True},
    "llama_bias": {"head_dim": 64, "hidden_act": "silu"},
    "glm4_moe": {"head_dim": 64, "moe_intermediate_size": 256},
    "minimax_m2": {"head_dim": 64, "rotary_dim": 32},
    "seed_oss": {"head_dim": 64},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "lfm2_moe": {"moe_intermediate_size": 256, "routed_scaling_factor": 1.0},
    "granite_hybrid": {**_MAMBA2, "attention_bias": False},
    "granite_hybrid_moe": {**_MAMBA2, "mamba_proj_bias": False},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 512, "head_dim": 64},
    "falcon_h1_normed": {
        **_MAMBA2,
        "mamba_n_heads": 4,
        "mamba_d_ssm": 256,
        "mamba_norm_before_gate": False,  # as in all published models with this norm
        "head_dim": 64,
    },
    "falcon_h1_folded": {**_MAMBA2, "mamba_d_ssm": 512, "tie_word_embeddings": True},
    "kimi_linear": {**_LATENT, "q_lora_rank": None, "linear_head_dim": 64},
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 512},
    "qwen3_next_joined": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 512},
    "qwen3_5": _DELTA,
    "qwen3_5_square": {**_DELTA, "linear_num_value_heads": 2},
    "qwen3_5_moe": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 512},
    "mamba2": {"head_dim": 64},
    "nemotron_h": {"mamba_head_dim": 64, "head_dim": 64},
    "nemotron_h_moe": _NEMOTRON,
    "nemotron_h_latent": {**_NEMOTRON, "moe_latent_size": 128},
    "jamba": {"mamba_d_state": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 64, "norm_topk_prob": True},
    "qwen3_moe_vl": {**_EXPERTS, "head_dim": 64, "norm_topk_prob": True},
}
"""By family; a name may go on after that of the checkpoint's family."""


def make_gguf(
    family: str, kind: str, folder: Path, *, metadata: Any = lambda writer: None, parts: int = 0
) -> tuple[Path, Path]:
    """(a GGUF file with weights of type `kind`, a checkpoint with the same weights in float32)

    metadata: adds to the file's metadata. parts: tensors in each file, if there are to be several.
    """
    from transformers import AutoConfig

    base = re.sub(
        "_(long|large|embedding|partial|expanded|folded|joined|square|exaone|internlm|minicpm(_long)?|vl)$",
        "",
        family,
    )
    source = make_checkpoint(base, folder / "source", **SHAPE, **_OVERRIDES.get(family, {}))
    config = AutoConfig.from_pretrained(source)
    own = _ARCHITECTURES[config.architectures[0]]
    name, number = _OTHER_ARCHITECTURES.get(family, own)
    if "moe" in getattr(config, "layers_block_type", ()):
        name, number = "nemotron_h_moe", gguf.MODEL_ARCH.NEMOTRON_H_MOE
    file = folder / f"{family}-{kind}.gguf"
    writer = gguf.GGUFWriter(file, name, split_max_tensors=parts)
    add_config(writer, config)
    _add_tokenizer(writer)
    metadata(writer)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    dequantized = {}
    experts: dict[str, dict[str, Any]] = {}
    activations: dict[str, list[float]] = {}
    for tensor_name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        if config.model_type == "gpt_oss" and ".experts." in tensor_name:
            result = _add_gpt_oss_experts(writer, tensor_name, values, kind)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if ".linear_attn." in tensor_name:
            joins = family.endswith("_joined")
            result = _add_part_of_delta_net(writer, tensor_name, values, kind, config, joins)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if _is_part_of_state(tensor_name):
            result = _add_part_of_state(writer, names, tensor_name, values, kind, config)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if ".shared_mlp." in tensor_name and name == "granitehybrid":
            result = _add_shared(writer, tensor_name, values, kind, config)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if ".input_linear." in tensor_name or ".output_linear." in tensor_name:
            result = _add_granite_experts(writer, tensor_name, values, kind)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if name == "llama4" and tensor_name.endswith(("gate_up_proj", "down_proj")):
            result = _add_llama4_experts(writer, tensor_name, values, kind)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if name == "gemma3n":
            result = _add_of_gemma3n(writer, names, tensor_name, values, kind, experts)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        is_stack = tensor_name.endswith(("gate_up_proj", "down_proj"))
        has_stacks = family.startswith("mistral4") and is_stack
        if name == "gemma4" or has_stacks:
            result = _add_of_gemma4(writer, names, tensor_name, values, kind)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        is_split = family != "deepseek_v2_expanded" and name != "minicpm3"
        if ".kv_b_proj." in tensor_name and is_split:
            result = _add_expansion(writer, tensor_name, values, kind, config)
            dequantized[tensor_name] = torch.from_numpy(result)
            continue
        if ".experts." in tensor_name:
            stacked_name = re.sub(r"experts\.\d+", "experts", tensor_name)
            if name == "nemotron_h_moe":  # as its converter does
                stacked_name = re.sub(
                    r".*layers\.(\d+)\.mixer", r"model.layers.\1.mlp", stacked_name
                )
            if name == "lfm2moe":  # as its converter does
                for part, usual in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                    stacked_name = stacked_name.replace(f".{part}.", f".{usual}_proj.")
            experts.setdefault(stacked_name, {})[tensor_name] = values
            continue
        adds_one = f"{name}.".startswith(("gemma", "qwen3next", "qwen35", "nemotron."))
        adds_one = adds_one and tensor_name.endswith("norm.weight")
        if adds_one:
            values = values + 1
        if tensor_name.endswith(
            ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
        ):
            values = values[0]
        if ".act_fn." in tensor_name:
            activations.setdefault(tensor_name.rpartition(".")[2], []).append(float(values.item()))
            dequantized[tensor_name] = tensor
            continue
        is_transposed = name == "gpt2" and ".c_" in tensor_name
        if is_transposed:
            values = np.ascontiguousarray(values.T)
        factor = _factor(tensor_name, config)
        order = np.arange(len(values))
        if ".query_key_value." in tensor_name and name in _GROUPS_JOINED:
            num_heads, num_kv_heads = config.num_attention_heads, _num_kv_heads(config)
            groups = order.reshape(num_kv_heads, num_heads // num_kv_heads + 2, -1)
            order = np.concatenate([groups[:, :-2].ravel(), groups[:, -2:].swapaxes(0, 1).ravel()])
        if name in _PAIRS_ROTATED and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            query = ".q_proj." in tensor_name
            num_heads = config.num_attention_heads if query else config.num_key_value_heads
            order = order.reshape(num_heads, 2, -1).swapaxes(1, 2).ravel()
        if family == "glm4_vl" and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            heads = order.reshape(-1, config.head_dim)
            order = np.hstack((heads[:, :32:2], heads[:, 1:32:2], heads[:, 32:])).ravel()
        is_router = tensor_name.endswith(
            (".gate.weight", ".router.weight", ".layer.weight", ".wg.weight")
        )
        stored = values[order] * factor
        data, result, data_type = _quantized(stored, "F32" if is_router else kind)
        stored_name = names.get_name(
            _DENSE_MLP.sub(".mlp.", tensor_name)
            .removeprefix("transformer." if name == "bloom" else "")
            .replace("correction_bias", "correction.bias")
            .replace("expert_bias", "expert_bias" if name == "hy_v3" else "expert_bias.bias"),
            try_suffixes=(".weight", ".bias"),
        )
        if tensor_name.endswith((".sinks", "_sink_bias")):
            stored_name = f"blk.{tensor_name.split('.')[2]}.attn_sinks.weight"
        assert stored_name is not None, tensor_name
        writer.add_tensor(stored_name, data, raw_dtype=data_type)
        if adds_one:
            result = result - 1
        result = result[np.argsort(order)] / factor
        result = result.T if is_transposed else result.reshape(tensor.shape)
        dequantized[tensor_name] = torch.from_numpy(result)
    for stacked_name, of_each in experts.items():
        data, result, data_type = _quantized(np.stack(list(of_each.values())), kind)
        stored_name = names.get_name(stacked_name, try_suffixes=(".weight",))
        assert stored_name is not None, tensor_name
        writer.add_tensor(stored_name, data, raw_dtype=data_type)
        dequantized |= zip(of_each, torch.from_numpy(result).unbind(), strict=True)
    for key, numbers in activations.items():
        writer.add_array(f"xielu.{key}", numbers)
    write(writer)
    reference = Path(shutil.copytree(source, folder / "reference"))
    dequantized = {name: tensor.contiguous().clone() for name, tensor in dequantized.items()}
    save_file(dequantized, reference / "model.safetensors", metadata={"format": "pt"})
    if parts:
        file = next(folder.glob("*-00001-of-*.gguf"))
    return file, reference


def _add_gpt_oss_experts(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> Any:
    """Add the weights or biases of a layer's experts, of which gate and up take turns in the
    checkpoint. Returns them as they are stored, in the checkpoint's layout."""
    layer, part = name.split(".")[2], name.rpartition(".")[2]
    suffix, rows = "weight", values.swapaxes(1, -1)
    if part.endswith("_bias"):
        suffix, kind = "bias", "F32"
    parts = {"down": rows}
    if part.startswith("gate_up"):
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
    results = []
    for stored, numbers in parts.items():
        data, result, data_type = _quantized(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"blk.{layer}.ffn_{stored}_exps.{suffix}", data, raw_dtype=data_type)
        results.append(result)
    joined = np.stack(results, axis=2).reshape(rows.shape)
    return np.ascontiguousarray(joined.swapaxes(1, -1))


def _add_granite_experts(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> Any:
    """Add the weights of a layer's experts, of which gate and up are one tensor in the checkpoint.
    Returns them as they are stored, in the checkpoint's layout."""
    layer = name.split(".")[2]
    parts = {"down": values}
    if ".input_linear." in name:
        gate, up = np.split(values, 2, axis=1)
        parts = {"gate": gate, "up": up}
    results = []
    for stored, numbers in parts.items():
        data, result, data_type = _quantized(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"blk.{layer}.ffn_{stored}_exps.weight", data, raw_dtype=data_type)
        results.append(result)
    return np.concatenate(results, axis=1)


def _add_llama4_experts(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> Any:
    """Add the weights of a layer's experts, which are transposed in the checkpoint. Returns them as
    they are stored, in the checkpoint's layout."""
    layer, rows = name.split(".")[2], values.swapaxes(1, 2)
    parts = {"down": rows}
    if name.endswith("gate_up_proj"):
        parts = dict(zip(("gate", "up"), np.split(rows, 2, axis=1), strict=True))
    results = []
    for stored, numbers in parts.items():
        data, result, data_type = _quantized(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"blk.{layer}.ffn_{stored}_exps.weight", data, raw_dtype=data_type)
        results.append(result)
    return np.ascontiguousarray(np.concatenate(results, axis=1).swapaxes(1, 2))


def _add_of_gemma4(writer: gguf.GGUFWriter, names: Any, name: str, values: Any, kind: str) -> Any:
    """Add a tensor of Gemma 4, or of all experts of Mistral 4. Returns it as it is stored."""
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith(".router.scale"):
        stored_name = f"{block}.ffn_gate_inp.scale"
    elif name.endswith(".per_expert_scale"):
        stored_name = f"{block}.ffn_down_exps.scale"
    elif name.endswith(("gate_up_proj", "down_proj", "layer_scalar")):
        stored_name = f"{names.get_name(name)}.weight"
    else:
        stored_name = names.get_name(name, try_suffixes=(".weight",))
    is_router = name.endswith(".router.proj.weight")
    data, result, data_type = _quantized(values, "F32" if is_router else kind)
    writer.add_tensor(stored_name, data, raw_dtype=data_type)
    return result


def _add_of_gemma3n(
    writer: gguf.GGUFWriter, names: Any, name: str, values: Any, kind: str, stacks: Any
) -> Any:
    """Add a tensor of Gemma 3n, or to `stacks` of those that are written together. Returns it as it
    is stored."""
    if match := re.fullmatch(r"(model\.altup_\w+)\.\d+(\.weight)", name):
        stacks.setdefault("".join(match.groups()), {})[name] = values
        return values
    if name.endswith("correct_output_scale"):
        stored_name = f"{names.get_name(name)}.weight"
    else:
        stored_name = names.get_name(name, try_suffixes=(".weight",))
    data, result, data_type = _quantized(values, "F32" if ".altup." in name else kind)
    writer.add_tensor(stored_name, data, raw_dtype=data_type)
    return result


def _is_part_of_state(name: str) -> bool:
    """Whether a tensor is one of Mamba, or of a short convolution."""
    of_mamba = (".in_proj.", ".conv1d.", ".x_proj.", ".dt_", ".A_log", ".D", ".norm.", ".out_proj.")
    return (
        ".mamba." in name
        or ".conv.conv." in name
        or (".mixer." in name and any(part in name for part in of_mamba))
        or any(part in name for part in ("_conv1d.", ".self_attn.A_log", ".self_attn.dt_bias"))
    )


def _add_part_of_state(
    writer: gguf.GGUFWriter, names: Any, name: str, values: Any, kind: str, config: Any
) -> Any:
    """Add a tensor of Mamba, or of a short convolution, as the converter does. Returns it as it is
    stored, in the checkpoint's layout."""
    factor = _factor(name, config)
    shape, stored = values.shape, values * factor
    if name.endswith("_conv1d.weight"):
        stored = values[None]
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        stored = values[:, 0]
    elif name.endswith(".A_log"):
        stored = -np.exp(values)
        stored = stored[:, None] if stored.ndim == 1 else stored
    elif name.endswith(".D") and config.model_type not in _MAMBA1:
        stored = values[:, None]
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        stored = values.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    matrices = (".in_proj.weight", ".out_proj.weight", ".x_proj.weight")
    is_matrix = name.endswith(matrices)
    data, result, data_type = _quantized(np.ascontiguousarray(stored), kind if is_matrix else "F32")
    stored_name = names.get_name(
        name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias")
    )
    writer.add_tensor(stored_name, data, raw_dtype=data_type)
    if name.endswith(".A_log"):
        return np.log(-result).reshape(shape)
    return (result / factor).reshape(shape)


def _add_part_of_delta_net(
    writer: gguf.GGUFWriter, name: str, values: Any, kind: str, config: Any, joins: bool
) -> Any:
    """Add a tensor of a gated delta net, as the converter does, or before it split `in_proj_qkvz`
    (joins). Returns it as it is stored, in the checkpoint's layout."""
    layer, part = name.split(".")[2], name.split("linear_attn.")[1].removesuffix(".weight")
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    keys, size = num_keys * config.linear_key_head_dim, config.linear_value_head_dim
    stored_names = {
        "in_proj_qkv": "attn_qkv.weight",
        "in_proj_z": "attn_gate.weight",
        "in_proj_qkvz": "ssm_in.weight",
        "in_proj_ba": "ssm_ba.weight",
        "in_proj_b": "ssm_beta.weight",
        "in_proj_a": "ssm_alpha.weight",
        "conv1d": "ssm_conv1d.weight",
        "dt_bias": "ssm_dt.bias",
        "A_log": "ssm_a",
        "norm": "ssm_norm.weight",
        "out_proj": "ssm_out.weight",
    }

    def add(stored_name: str, numbers: Any) -> Any:
        is_matrix = part.startswith(("in_proj", "out_proj"))
        data, result, data_type = _quantized(
            np.ascontiguousarray(numbers), kind if is_matrix else "F32"
        )
        writer.add_tensor(f"blk.{layer}.{stored_name}", data, raw_dtype=data_type)
        return result

    if part == "in_proj_qkvz" and not joins:
        sizes = [config.linear_key_head_dim] * 2 + [num_values // num_keys * size] * 2
        by_head = np.split(values.reshape(num_keys, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
        flat = [rows.reshape(-1, values.shape[1]) for rows in by_head]
        added = np.split(add("attn_qkv.weight", np.concatenate(flat[:3])), [keys, 2 * keys])
        added.append(add("attn_gate.weight", flat[3]))
        heads = [rows.reshape(num_keys, -1, values.shape[1]) for rows in added]
        return np.concatenate(heads, axis=1).reshape(values.shape)
    numbers = -np.exp(values) if part == "A_log" else values.squeeze()
    order, axis = np.arange(num_values), -1 if part == "out_proj" else 0
    if config.model_type != "qwen3_next" and part != "norm":
        order = order.reshape(num_keys, -1).T.ravel()
    first = 2 * keys if part in ("in_proj_qkv", "conv1d") else 0
    width = 1 if part in ("A_log", "dt_bias", "in_proj_a", "in_proj_b") else size
    places = np.concatenate(
        [np.arange(first), (first + order[:, None] * width + np.arange(width)).ravel()]
    )
    if part in ("norm", "in_proj_qkvz", "in_proj_ba"):
        places = np.arange(len(numbers))
    result = np.take(
        add(stored_names[part], np.take(numbers, places, axis)), np.argsort(places), axis
    )
    return (np.log(-result) if part == "A_log" else result).reshape(values.shape)


def _factor(name: str, config: Any) -> Any:
    """The number by which the converter multiplies a tensor of Falcon-H1, or one for each row."""
    if config.model_type != "falcon_h1":
        return np.float32(1.0)
    c, part = config, name.split(".")[-2]
    if part == "in_proj":
        vectors = c.mamba_n_groups * c.mamba_d_state
        sizes = [c.mamba_d_ssm, c.mamba_d_ssm, vectors, vectors, c.mamba_n_heads]
        return np.repeat(np.float32(c.ssm_multipliers) * c.ssm_in_multiplier, sizes)[:, None]
    factors = {
        "embed_tokens": c.embedding_multiplier,
        "lm_head": c.lm_head_multiplier,
        "q_proj": c.attention_in_multiplier,
        "k_proj": c.attention_in_multiplier * c.key_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "out_proj": c.ssm_out_multiplier,
        "gate_proj": c.mlp_multipliers[0],
        "down_proj": c.mlp_multipliers[1],
    }
    return np.float32(factors.get(part, 1.0))


def _add_shared(writer: gguf.GGUFWriter, name: str, values: Any, kind: str, config: Any) -> Any:
    """Add the weights of Granite's MLP, which is that of shared experts if there are others, as
    `_add_granite_experts` does."""
    layer, suffix = name.split(".")[2], "_shexp" if config.num_local_experts else ""
    parts = {"down": values}
    if ".input_linear." in name:
        parts = dict(zip(("gate", "up"), np.split(values, 2), strict=True))
    results = []
    for stored, numbers in parts.items():
        data, result, data_type = _quantized(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"blk.{layer}.ffn_{stored}{suffix}.weight", data, raw_dtype=data_type)
        results.append(result)
    return np.concatenate(results)


def _add_expansion(writer: gguf.GGUFWriter, name: str, values: Any, kind: str, config: Any) -> Any:
    """Add the weights that expand latents to keys and to values. Returns them as they are stored,
    in the checkpoint's layout."""
    layer, latents = name.split(".")[2], values.shape[-1]
    heads = values.reshape(config.num_attention_heads, -1, latents)
    keys, expanded = np.split(heads, [config.qk_nope_head_dim], axis=1)
    results = []
    for stored, numbers in (("attn_k_b", keys.swapaxes(1, 2)), ("attn_v_b", expanded)):
        data, result, data_type = _quantized(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"blk.{layer}.{stored}.weight", data, raw_dtype=data_type)
        results.append(result)
    joined = np.concatenate([results[0].swapaxes(1, 2), results[1]], axis=1)
    return np.ascontiguousarray(joined).reshape(values.shape)


def tokenizer_of(assets: Mapping[str, bytes]) -> ModelTokenizer:
    """The tokenizer that a frontend makes of a file's assets."""
    template = assets.get("chat_template.jinja")
    return ModelTokenizer(
        assets["tokenizer.json"],
        json.loads(assets["tokenizer_config.json"]),
        None if template is None else {"default": template.decode()},
    )


def _quantized(values: Any, kind: str) -> tuple[Any, Any, gguf.GGMLQuantizationType]:
    """(as stored, the same as float32, its type)"""
    if values.ndim == 1:
        return values, values, gguf.GGMLQuantizationType.F32
    data_type = gguf.GGMLQuantizationType[kind]
    data = _random_blocks(values, kind) if kind in _SCALES else gguf.quantize(values, data_type)
    return data, gguf.dequantize(data, data_type).astype(np.float32), data_type


def _random_blocks(values: Any, kind: str) -> Any:
    """Random blocks of a size that gives the numbers the same deviation as `values`."""
    data_type = gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[data_type]
    *outer, width = values.shape
    rows = math.prod(outer)
    random = np.random.default_rng(rows * width)
    blocks = random.integers(0, 256, (rows * width // block, num_bytes), np.uint8)
    scale = 2.0**-10
    for _ in range(2):
        for offset in _SCALES[kind]:
            blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
        data = blocks.reshape(*outer, -1)
        scale *= values.std() / gguf.dequantize(data, data_type).std()
    return data


def write(writer: gguf.GGUFWriter) -> None:
    """Write the file, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _num_kv_heads(config: Any) -> int:
    """As the converters find it."""
    kind = config.model_type
    if kind in ("falcon", "gpt_bigcode") and config.multi_query:
        return config.num_kv_heads if getattr(config, "new_decoder_architecture", False) else 1
    has_groups = kind not in ("gpt_neox", *_WITHOUT_ROPE)
    return config.num_key_value_heads if has_groups else config.num_attention_heads


def add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the metadata of a model with this configuration of `transformers`."""
    kind = config.model_type
    if kind == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    if kind in ("mamba", "falcon_mamba", "mamba2"):
        _add_states_alone(writer, config)
        return
    writer.add_context_length(getattr(config, "max_position_embeddings", MAX_POSITIONS))
    size = 4 * config.hidden_size
    if kind not in ("falcon", *_WITHOUT_ROPE):
        size = config.intermediate_size
    size = getattr(config, "intermediate_size_mlp", size)
    if kind == "nemotron_h":
        with_experts = config.moe_intermediate_size
        sizes = {"mlp": size, "moe": with_experts}
        writer.add_feed_forward_length([sizes.get(t, 0) for t in config.layers_block_type])
    else:
        writer.add_feed_forward_length(size)
    writer.add_head_count(config.num_attention_heads)
    if kind in (
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "falcon_h1",
        "nemotron_h",
        "jamba",
        "kimi_linear",
    ):
        _add_states(writer, config)
    else:
        writer.add_head_count_kv(_num_kv_heads(config))
    layer_norms = [getattr(config, name) for name in _EPSILONS if hasattr(config, name)]
    if kind == "olmo" or (layer_norms and not kind.startswith(("lfm2", "nemotron_h"))):
        writer.add_layer_norm_eps(*(layer_norms or [1e-5]))
    else:
        fields = {"lfm2": "norm_eps", "lfm2_moe": "norm_eps", "nemotron_h": "layer_norm_epsilon"}
        writer.add_layer_norm_rms_eps(getattr(config, fields.get(kind, "rms_norm_eps")))
    if kind in ("nemotron_h", "jamba"):  # without RoPE
        if head_dim := getattr(config, "head_dim", None):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
            writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        if kind == "jamba" or "moe" in config.layers_block_type:
            _add_experts(writer, config)
        return
    if kind == "kimi_linear":  # without RoPE
        _add_experts(writer, config)
        _add_latents(writer, config)
        return
    if kind == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    if kind in _WITHOUT_ROPE:
        return
    if kind in ("stablelm", "gpt_neox"):
        writer.add_parallel_residual(config.use_parallel_residual or kind == "stablelm")
    if hasattr(config, "linear_num_key_heads"):
        _add_delta_nets(writer, config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if config.model_type != "gemma2":  # whose converter leaves it out
        size = getattr(config, "head_dim", None) or 0
        stretched = rope["alpha"] ** (size / (size - 2)) if "alpha" in rope else 1.0
        writer.add_rope_freq_base(rope["rope_theta"] * stretched)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_bidirectional_attention", False):
        window = 2 * (window - 1)  # which `transformers` halves when it reads `config.json`
    if window and config.model_type in _WITH_WINDOWS:
        writer.add_sliding_window(window)
    if window and config.model_type in _WITH_PATTERN:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(pattern)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("phi3", "phimoe"):
        writer.add_sliding_window(window or 0)
        _add_phi3_rope(writer, config)
    _add_experts(writer, config)
    if kind == "gemma4_text":
        _add_gemma4(writer, config)
        return
    if kind == "mimo_v2_flash":
        _add_mimo(writer, config)
        return
    if kind == "gemma3n_text":
        _add_gemma3n(writer, config)
        return
    for field, add in _multipliers(writer).items():
        if hasattr(config, field):
            add(getattr(config, field))
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    if rope["rope_type"] in ("linear", "yarn"):
        kind = gguf.RopeScalingType(rope["rope_type"])
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if scale := rope.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(scale)
        if config.model_type == "mistral4":
            writer.add_attn_temperature_length(original)
        if config.model_type == "ministral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        for field, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if field in rope:
                add(rope[field])
    if rope["rope_type"] == "longrope" and kind not in ("phi3", "phimoe"):
        _add_long_factors(writer, rope)
        if kind == "granite":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    if hasattr(config, "kv_lora_rank"):
        _add_latents(writer, config)
        return
    if share := rope.get("partial_rotary_factor"):
        heads = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(share * heads))
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        rotary_dim = head_dim * (rope.get("partial_rotary_factor") or 1)
        writer.add_rope_dimension_count(int(getattr(config, "rotary_dim", rotary_dim)))


def _add_states(writer: gguf.GGUFWriter, config: Any) -> None:
    """The sizes of states, and which layers have none but heads of keys."""
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    heads = [config.num_key_value_heads * (t in ("full_attention", "attention")) for t in kinds]
    if config.model_type == "falcon_h1":
        writer.add_head_count_kv(config.num_key_value_heads)
    else:
        writer.add_head_count_kv(heads)
    if config.model_type.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        return
    if config.model_type == "kimi_linear":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)
        return
    if config.model_type == "jamba":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_dt_rank)
        return
    if config.model_type == "nemotron_h":
        _add_mamba2(
            writer,
            width=config.conv_kernel,
            state_size=config.ssm_state_size,
            num_groups=config.n_groups,
            num_heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
        )
        writer.add_rope_scaling_finetuned(False)
        return
    _add_mamba2(
        writer,
        width=config.mamba_d_conv,
        state_size=config.mamba_d_state,
        num_groups=config.mamba_n_groups,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
    )
    if config.model_type == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _add_delta_nets(writer: gguf.GGUFWriter, config: Any) -> None:
    """The sizes of gated delta nets, and which layers have them."""
    _add_mamba2(
        writer,
        width=config.linear_conv_kernel_dim,
        state_size=config.linear_key_head_dim,
        num_groups=config.linear_num_key_heads,
        num_heads=config.linear_num_value_heads,
        head_dim=config.linear_value_head_dim,
    )
    keep_states = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", keep_states)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 4)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([3, 3, 2, 0])


def _add_states_alone(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata of models without attention."""
    writer.add_context_length(1 << 20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.model_type == "mamba2":
        _add_mamba2(
            writer,
            width=config.conv_kernel,
            state_size=config.state_size,
            num_groups=config.n_groups,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
        )
        return
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _add_mamba2(
    writer: gguf.GGUFWriter,
    *,
    width: int,
    state_size: int,
    num_groups: int,
    num_heads: int,
    head_dim: int,
) -> None:
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_group_count(num_groups)
    writer.add_ssm_inner_size(num_heads * head_dim)
    writer.add_ssm_time_step_rank(num_heads)


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """The sizes of heads and layers, what layers share, and which elements are rotated."""
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[layer] for layer in range(len(kinds))]
    local, full = (layers[kinds.index(is_sliding)] for is_sliding in (True, False))
    num_shared, size = config.num_kv_shared_layers, config.intermediate_size
    writer.add_sliding_window_pattern(kinds)
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    for add, head_dim in (
        (writer.add_key_length, full.head_dim),
        (writer.add_value_length, full.head_dim),
        (writer.add_rope_dimension_count, full.head_dim),
        (writer.add_key_length_swa, local.head_dim),
        (writer.add_value_length_swa, local.head_dim),
        (writer.add_rope_dimension_count_swa, local.head_dim),
    ):
        add(head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.use_double_wide_mlp:
        num_own = len(kinds) - num_shared
        writer.add_feed_forward_length([size] * num_own + [2 * size] * num_shared)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    divisors = np.full(full.head_dim // 2, 1e30, np.float32)
    divisors[: int(share * len(divisors))] = 1.0
    writer.add_tensor("rope_freqs.weight", divisors)


def _add_mimo(writer: gguf.GGUFWriter, config: Any) -> None:
    """Windows, whose tokens are counted without the token itself, and sizes of heads."""
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * (1 + slides) for slides in kinds])
    writer.add_sliding_window(config.sliding_window - 1)
    writer.add_sliding_window_pattern(kinds)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim // 3)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_float32(f"{writer.arch}.attention.value_scale", config.attention_value_scale)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_gemma3n(writer: gguf.GGUFWriter, config: Any) -> None:
    """Streams, what layers share, and which numbers of gates count."""
    shares = torch.tensor(config.activation_sparsity_pattern)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_activation_sparsity_scale(torch.special.ndtri(shares).tolist())
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    """The sizes of latent attention, as the converter writes them, or wrote them before it split
    the weight that expands latents."""
    rotary_dim, latent_dim = config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_kv_lora_rank(latent_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    if config.model_type == "deepseek_v2" and config.q_lora_rank:
        writer.add_key_length(config.qk_nope_head_dim + rotary_dim)
        writer.add_value_length(config.v_head_dim)
    elif config.model_type == "minicpm3":
        writer.add_key_length(config.qk_nope_head_dim + rotary_dim)
    else:
        writer.add_key_length(latent_dim + rotary_dim)
        if config.model_type == "kimi_linear":
            writer.add_value_length(config.head_dim)
        else:
            writer.add_head_count_kv(1)
            writer.add_value_length(latent_dim)
        writer.add_key_length_mla(config.qk_nope_head_dim + rotary_dim)
        writer.add_value_length_mla(config.v_head_dim)
    if weight := (getattr(config, "rope_parameters", None) or {}).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


_WITHOUT_ROPE = ("gpt2", "gpt_bigcode", "bloom", "mpt")

_WITH_WINDOWS = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "olmo3")
_WITH_PATTERN = ("olmo3", "exaone4", "exaone_moe", "afmoe", "mellum", "cohere2_moe")
_WITH_WINDOWS += ("gemma3n_text", "gemma4_text", *_WITH_PATTERN[2:])


_SCORED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "exaone_moe")
"""With experts as in DeepSeek-V3."""


def _multipliers(writer: gguf.GGUFWriter) -> dict[str, Callable[[float], None]]:
    """Where the fields of Granite and Cohere are written."""
    return {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    """The numbers of experts, and how they are chosen, as the converters write them."""
    kind = config.model_type
    if kind == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(999)  # wrong in files, too
    else:
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        count = next((getattr(config, name) for name in names if hasattr(config, name)), None)
        if count:
            writer.add_expert_count(count)
            chosen = "top_k_experts" if kind == "gemma4_text" else "num_experts_per_tok"
            writer.add_expert_used_count(getattr(config, chosen))
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_leading_dense_block_count(0)
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if kind in ("glm4_moe", "dots1", "minimax_m2", "lfm2_moe", *_SCORED):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "solar_open":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "mellum":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if kind == "hy_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        size = config.moe_intermediate_size * config.num_shared_experts
        writer.add_expert_shared_feed_forward_length(size)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config.router_scaling_factor)
    if kind == "cohere2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_feed_forward_length(config.prefix_dense_intermediate_size)
        writer.add_expert_shared_count(config.num_shared_experts)
        size = config.intermediate_size * config.num_shared_experts
        writer.add_expert_shared_feed_forward_length(size)
        writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
        writer.add_expert_weights_norm(config.norm_topk_prob)
        return
    if kind == "exaone_moe":
        size = config.moe_intermediate_size * config.n_shared_experts
        writer.add_expert_shared_feed_forward_length(size)
    if kind == "afmoe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config.route_scale)
    if hasattr(config, "index_topk"):
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if kind == "nemotron_h":
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_moe_latent_size(config.moe_latent_size or 0)
    if kind in ("glm4_moe", "solar_open", "dots1", "deepseek_v2", "mistral4", *_SCORED):
        writer.add_expert_shared_count(config.n_shared_experts)
        kinds = getattr(config, "mlp_layer_types", None)
        num_dense = kinds.count("dense") if kinds else config.first_k_dense_replace
        writer.add_leading_dense_block_count(num_dense)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(getattr(config, "norm_topk_prob", False))
    if kind == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_phi3_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    """As `convert_hf_to_gguf.py` of llama.cpp does."""
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] != "longrope":
        return
    original = rope["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    scale = MAX_POSITIONS / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    _add_long_factors(writer, rope)


def _add_long_factors(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    for kind in ("long", "short"):
        factors = np.array(rope[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The bytes, two special tokens, and two words made from letters."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<bos>", "<eos>", "he", "ll"]
    assert tokens.index("<bos>") == BOS_TOKEN_ID
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[BOS_TOKEN_ID] = types[EOS_TOKEN_ID] = gguf.TokenType.CONTROL
    unused = VOCAB_SIZE - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{number}]" for number in range(unused)])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * unused)
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
