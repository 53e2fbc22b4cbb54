"""Tiny random checkpoints of many families, with a byte-level tokenizer.

`checkpoint("llama")` makes one per process and family; `make_checkpoint` writes one to a place of
your own. Weights are large enough that greedy continuations vary.
"""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.folders import folder_of_process
from tests.support.text_models import class_of

VOCAB_SIZE = 300
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
MAX_POSITIONS = 256

_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_experts": 4}
_SCORED_MOE: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LATENT: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}

_GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
_GRANITE_SWA: dict[str, Any] = {
    **_GRANITE,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_rope_theta": [10000.0, 0, 500.0],
}
_INDEXER: dict[str, Any] = {"index_topk": MAX_POSITIONS, "index_n_heads": 2, "index_head_dim": 16}

_LFM2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}

_HYBRID: dict[str, Any] = {
    **_MAMBA2,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.1,
    "shared_intermediate_size": 56,
}

_MULTIPLIERS: dict[str, Any] = {
    "key_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.3],
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
}

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 24,
    "shared_expert_intermediate_size": 56,
    "pad_token_id": 0,
}

_NEMOTRON_STATES: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 16,
    "head_dim": 24,
    "time_step_min": 1e-9,  # see `nemotron_h_settings`
}

_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    **_NEMOTRON_STATES,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
}

# What differs from the common shape; a family without `model_type` has the name of its own.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 24},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_bias": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "llama_linear": {"model_type": "llama", **_rope("linear", factor=3.0)},
    "llama_dynamic": {
        "model_type": "llama",
        **_rope("dynamic", factor=4.0),
        "max_position_embeddings": 64,
    },
    "llama_llama3": {
        "model_type": "llama",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    },
    "llama_yarn": {
        "model_type": "llama",
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64),
        "head_dim": 24,
    },
    "exaone": {},
    "mistral": {"sliding_window": 11},
    "mistral_full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {},
    "qwen2_sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 24},
    "lfm2": _LFM2,
    "lfm2_biased": {
        "model_type": "lfm2",
        **_LFM2,
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_multiple_of": 8,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {**_MOE, **_LFM2, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "head_dim": 24,
        "sliding_window": 9,
    },
    "lfm3_plain": {
        "model_type": "lfm3",
        "layer_types": ["conv", "sliding_attention"],
        "sliding_window": 11,
        "head_dim": 24,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
        "conv_L_cache": 4,
        "conv_bias": True,
        "tie_word_embeddings": False,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 4,
        "attention_window_size": 9,
        "num_key_value_heads": 1,
        "w_init_variance_scale": 0.16,
    },
    "mamba": {"use_bias": True},
    "falcon_mamba": {"use_conv_bias": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 16},
    "bamba": {**_MAMBA2, "mamba_n_groups": 1, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granite_hybrid": {"model_type": "granitemoehybrid", **_HYBRID, "num_local_experts": 0},
    "granite_hybrid_moe": {
        "model_type": "granitemoehybrid",
        **_HYBRID,
        "num_local_experts": 4,
        "intermediate_size": 40,
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
    },
    "falcon_h1": {**_MAMBA2, **_MULTIPLIERS, "mamba_d_ssm": 128},
    "falcon_h1_normed": {
        "model_type": "falcon_h1",
        **_MAMBA2,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_n_groups": 1,
        "mamba_rms_norm": True,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "use_bias": True,
        **_NEMOTRON_STATES,
    },
    "nemotron_h_moe": {"model_type": "nemotron_h", **_NEMOTRON},
    "nemotron_h_latent": {"model_type": "nemotron_h", **_NEMOTRON, "moe_latent_size": 32},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
    },
    "lara_mini": {
        **_MOE,
        **_DELTA,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "sliding_attention",
            "linear_attention",
            "full_attention",
        ],
        "sliding_window": 9,
    },
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 20,
        "linear_num_heads": 4,
        "moe_intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "pad_token_id": 0,
    },
    "bailing_hybrid": {
        **_LATENT,
        "q_lora_rank": None,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 20,
        "moe_intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
    },
    "bailing_hybrid_plain": {
        "model_type": "bailing_hybrid",
        **_LATENT,
        "layer_group_size": 2,
        "head_dim": 20,
        "moe_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kda_safe_gate": False,
        "pad_token_id": 0,
    },
    "glm5_next": {
        "model_type": "glm5_next_text",
        "architectures": ["Glm5NextForCausalLM"],
        **{key: value for key, value in _LATENT.items() if key != "qk_rope_head_dim"},
        **_SCORED_MOE,
        **_INDEXER,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "indexed_attention",
            "linear_attention",
            "linear_attention",
        ],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "linear_head_dim": 20,
        "linear_num_heads": 4,
        "index_kpool": 4,
        "indexer_types": ["full"] * 4,
        "swiglu_limit": 1.5,
        "hc_mult": 3,
        "hc_eps": 1e-3,
        "pad_token_id": 0,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"] * 2,
        "num_mem_blocks": 2,
        "initializer_range": 0.1,
        "num_key_value_heads": 4,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "chunk_size": 16,
        "add_bias_linear": True,
        "pad_token_id": 0,
    },
    "olmo_hybrid": {
        **_rope("default", rope_theta=None),
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 12,
    },
    "qwen3_next": {**_MOE, **_DELTA},
    "qwen3_next_dense": {
        "model_type": "qwen3_next",
        **_MOE,
        **_DELTA,
        "mlp_only_layers": [1],
        "linear_num_value_heads": 2,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **_DELTA,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_MOE, **_DELTA},
    "opt": {"ffn_dim": 88, "init_std": 0.2},
    "opt_350m": {
        "model_type": "opt",
        "ffn_dim": 88,
        "init_std": 0.2,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 48,
    },
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {"n_inner": 88},
    "gpt_bigcode_heads": {"model_type": "gpt_bigcode", "multi_query": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 56},
    "qwen2_moe_sliding": {
        "model_type": "qwen2_moe",
        **_MOE,
        "shared_expert_intermediate_size": 56,
        "use_sliding_window": True,
        "sliding_window": 9,
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "qwen3_moe": {**_MOE, "head_dim": 24},
    "qwen3_moe_sliding": {
        "model_type": "qwen3_moe",
        **_MOE,
        "use_sliding_window": True,
        "sliding_window": 9,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "gemma": {"head_dim": 24},
    "gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": False,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {
        **_SCORED_MOE,
        "head_dim": 24,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {**_SCORED_MOE, "sliding_window": 9, "max_window_layers": 1},
    "solar_open": {**_SCORED_MOE, "head_dim": 24, "attention_bias": True},
    "exaone_moe": {
        **_SCORED_MOE,
        "num_experts": 8,
        "num_shared_experts": 2,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hy_v3": {**_MOE, "head_dim": 24, "router_scaling_factor": 1.5},
    "afmoe": {
        **_MOE,
        "head_dim": 24,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "route_scale": 1.5,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "mup_enabled": True,
    },
    "sarvam_moe": {**_SCORED_MOE, "head_dim": 24, "attention_bias": True},
    "kolibri1": {
        **_MOE,
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "shared_expert_intermediate_size": 56,
    },
    "step3p5": {
        "architectures": ["Step3p5ForCausalLM"],
        "pad_token_id": 0,
        "num_hidden_layers": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "head_dim": 24,
        "share_expert_dim": 56,
        "sliding_window": 9,
        "num_sliding_attention_heads": 6,
        "layer_types": [*["full_attention", "sliding_attention"] * 2],
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
        "query_pre_attn_scalar": 20,
        "moe_router_scaling_factor": 1.5,
        "swiglu_limits": [None, None, 0.0, 0.6],
        "swiglu_limits_shared": [None, 0.4, None, 0.8],
    },
    "laguna": {
        **_MOE,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "shared_expert_intermediate_size": 56,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6, 2],
        "moe_routed_scaling_factor": 1.5,
    },
    "laguna_elements": {
        "model_type": "laguna",
        **_MOE,
        "head_dim": 24,
        "shared_expert_intermediate_size": 56,
        "gating": "per-element",
        "mlp_layer_types": ["sparse", "dense"],
    },
    "muse_glimmer": {
        "model_type": "muse_glimmer_text",
        "architectures": ["MuseGlimmerForCausalLM"],
        "num_hidden_layers": 5,
        "head_dim": 24,
        "sliding_window": 9,
        "output_multiplier": 0.4,
        "final_logit_softcapping": 7.0,
        "post_norm_eps": 1e-2,
    },
    "mellum": {
        **_MOE,
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "cohere2_moe": {
        **_MOE,
        "num_hidden_layers": 3,
        "logit_scale": 0.25,
        "num_shared_experts": 2,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "first_k_dense_replace": 1,
        "expert_selection_fn": "sigmoid",
    },
    "deepseek_v2": {
        **_LATENT,
        **_SCORED_MOE,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**_LATENT, **_SCORED_MOE},
    "deepseek_v3_yarn": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_SCORED_MOE,
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=32,
            beta_slow=1,
            mscale=0.707,
            mscale_all_dim=0.9,
        ),
        "attention_bias": True,
        "rope_interleave": False,
    },
    "deepseek_v32": {**_LATENT, **_SCORED_MOE, **_INDEXER},
    "axk1": {**_LATENT, **_SCORED_MOE},
    "axk2": {
        **_LATENT,
        **{k: v for k, v in _SCORED_MOE.items() if k not in ("n_group", "topk_group")},
        **_INDEXER,
        "num_hidden_layers": 3,
        "gated_norm_rank": 12,
    },
    "axk2_groups": {
        "model_type": "axk2",
        **_LATENT,
        **_SCORED_MOE,
        **_INDEXER,
        "attention_bias": True,
    },
    "dots3_note": {
        "model_type": "dots3_note_text",
        **_LATENT,
        **_SCORED_MOE,
        **_INDEXER,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "shared_experts_intermediate_size": 56,
        "layer_types": [
            *("indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention")
        ],
        "sliding_window": 9,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 48,
        "swa_kv_lora_rank": 96,
        "swa_head_dim": 28,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 20,
        "swa_qk_rope_head_dim": 12,
    },
    "glm_moe_dsa": {**_LATENT, **_SCORED_MOE, **_INDEXER, "indexer_types": ["full", "shared"]},
    "glm4_moe_lite": {
        **_LATENT,
        **{k: v for k, v in _SCORED_MOE.items() if k != "first_k_dense_replace"},
    },
    "youtu": _LATENT,
    "minicpm3": {
        **_LATENT,
        "v_head_dim": None,
        "attention_bias": True,
        "scale_emb": 3,
        "scale_depth": 0.9,
        "dim_model_base": 32,
    },
    "mistral4": {
        "architectures": ["Mistral4ForCausalLM"],
        **_LATENT,
        **_SCORED_MOE,
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    },
    "hy_v4": {
        **_LATENT,
        **_SCORED_MOE,
        **_INDEXER,
        "num_hidden_layers": 3,
        "hc_mult": 3,
        "hc_magnitude": 1.5,
        "hc_eps": 1e-3,
        "learnable_sink_init": 1.5,
        "swiglu_limit": 2.0,
    },
    "longcat_flash": {
        **_LATENT,
        "kv_lora_rank": 128,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "moe_topk": 3,
        "n_routed_experts": 6,
        "zero_expert_num": 4,
        "expert_ffn_hidden_size": 40,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "head_dim": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi3": {"sliding_window": 10},
    "olmo2": {},
    "granite": _GRANITE,
    "phi3_long": {
        "model_type": "phi3",
        **_rope(
            "longrope",
            short_factor=[1.0 + i / 8 for i in range(8)],
            long_factor=[2.0 + i for i in range(8)],
            original_max_position_embeddings=128,
        ),
    },
    "olmo3": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {"head_dim": 24},
    "glm": {"head_dim": 24},
    "helium": {"head_dim": 16},
    "ministral": {
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cwm": {"head_dim": 24, "sliding_window": 9},
    "olmo": {},
    "nanochat": {"initializer_range": 0.4},
    "jais2": {},
    "granite_swa": _GRANITE_SWA,
    "hyperclovax": {**_GRANITE, "attention_multiplier": None},
    "glm4": {"head_dim": 24},
    "arcee": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "starcoder2": {"sliding_window": 13},
    "stablelm": {"partial_rotary_factor": 0.5},
    "phi_plain": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "gpt_neox_sequential": {
        "model_type": "gpt_neox",
        "rotary_pct": 0.5,
        "use_parallel_residual": False,
    },
    "stablelm_parallel": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.5,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
    },
    "cohere_plain": {"model_type": "cohere", "logit_scale": 0.25},
    "cohere2": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {},
    "gptj": {"rotary_dim": 8, "n_inner": 88},
    "falcon": {"ffn_hidden_size": 88},
    "falcon_groups": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
    },
    "falcon_alibi": {
        "model_type": "falcon",
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": MAX_POSITIONS},
    "ministral3": {
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
        "head_dim": 24,
    },
    "olmoe": {**_MOE, "norm_topk_prob": True},
    "granitemoe": {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **_GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 56,
    },
    "granitemoe_swa": {**_GRANITE_SWA, "num_local_experts": 4, "shared_intermediate_size": 56},
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 24,
        "rotary_dim": 12,
    },
    "minimax_m3": {
        "model_type": "minimax_m3_vl_text",
        **_rope("default", partial_rotary_factor=0.5),
        "num_hidden_layers": 3,
        "head_dim": 24,
        "rotary_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 56,
        "swiglu_limit": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 16,
        "index_topk_blocks": MAX_POSITIONS // 16,
    },
    "ernie4_5": {"head_dim": 24, "use_bias": True},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": False,
    },
    "apertus": {},
    "apertus1p5": {
        "model_type": "apertus1p5_text",
        "vocab_size": VOCAB_SIZE + 20,
        "output_vocab_size": VOCAB_SIZE,
    },
    "hunyuan_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 24, "attention_bias": True},
    "hunyuan_alpha": {
        "model_type": "hunyuan_v1_dense",
        **_rope("dynamic", alpha=50.0, factor=1.0),
        "head_dim": 16,
    },
    "hunyuan_moe": {
        "model_type": "hunyuan_v1_moe",
        "num_experts": 4,
        "moe_topk": [2, 3],
        "head_dim": 24,
    },
    "flint": {
        **_MOE,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "sliding_window": 9,
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "shared_expert_intermediate_size": 56,
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "attention_value_scale": 0.6,
    },
    "phimoe": {"num_local_experts": 4, "lm_head_bias": True, "router_jitter_noise": 0.2},
    "phimoe_long": {
        "model_type": "phimoe",
        **_rope(
            "longrope",
            short_factor=[1.0 + i / 8 for i in range(8)],
            long_factor=[2.0 + i for i in range(8)],
            original_max_position_embeddings=MAX_POSITIONS,
            short_mscale=1.1,
            long_mscale=1.3,
        ),
        "num_local_experts": 4,
    },
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 24,
        "attention_chunk_size": 16,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": VOCAB_SIZE - 7,
        "hidden_size_per_layer_input": 8,
        "altup_active_idx": 1,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.7, 0.0],
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 40, "num_key_value_heads": 1}},
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_shared": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 40,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 3,
        "tie_word_embeddings": False,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_plain": {
        "model_type": "gemma4_text",
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 40,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "tie_word_embeddings": False,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 40,
        "tie_word_embeddings": False,
    },
    "gemma4_moe": {
        "model_type": "gemma4_text",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 40,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "bert_generation": {"model_type": "bert-generation", "is_decoder": True},
    "minicpm3_bias": {
        "model_type": "minicpm3",
        **_LATENT,
        "q_lora_rank": None,
        "attention_bias": True,
    },
    "flex_olmo": {**_MOE, "intermediate_size": 96},
    "vaultgemma": {
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
}

FAMILIES = tuple(_FAMILIES)
TRANSFORMERS_FAMILIES = FAMILIES[FAMILIES.index("phi") :]
NATIVE_FAMILIES = FAMILIES[: FAMILIES.index("phi")]


@cache
def checkpoint(family: str) -> Path:
    """The directory of a tiny checkpoint of `family`, made once per process."""
    return make_checkpoint(family, _folder() / family)


@cache
def _folder() -> Path:
    return folder_of_process("checkpoints")


def make_checkpoint(family: str, path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random checkpoint of `family` to `path`, with a tokenizer; returns `path`.

    `overrides` are further settings of its configuration.
    """
    import torch
    import transformers

    # Copied, since some configurations change the dictionaries that they are given.
    settings = copy.deepcopy({"model_type": family, **_SHAPE, **_FAMILIES[family], **overrides})
    config = transformers.AutoConfig.for_model(**settings)
    model_class = class_of(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or name.endswith("gate_bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                # Of the scores of experts, zeros at first, and of a layer's output, 1 at first.
                if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                    buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """A tokenizer whose ids 0 to 255 are bytes, with a chat template, as files in `path`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": MAX_POSITIONS,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
