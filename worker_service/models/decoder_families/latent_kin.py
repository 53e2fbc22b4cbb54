"""MiniCPM3 and Mistral 4: latent attention as in DeepSeek, with the multipliers of MiniCPM, or with
queries that are scaled by their positions, and experts that are chosen by the softmax of their
scores. DeepSeek-V3.2 and GLM-5 (`GlmMoeDsa`), as far as their attention is not sparse. A.X-K1, with
a norm behind its experts."""

from dataclasses import replace

from worker_service.models.decoder.specs import DecoderSettings
from worker_service.models.decoder_families.common import (
    CORRECTIONS,
    Config,
    gated_mlp,
    grouped,
    have_experts,
    require,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.latent import (
    EXPERT_NAMES,
    experts_of,
    first_dense,
    latent_decoder,
    scored_experts,
)
from worker_service.models.decoder_families.mixtures import STACK_NAMES
from worker_service.models.feed_forward.experts import ExpertStorage
from worker_service.models.layers.rotary import QUERY_SCALING

_STACK_NAMES = {"feed_forward.router": "mlp.gate"} | STACK_NAMES

_AXK1_NAMES = EXPERT_NAMES | {"feed_forward_output_norm": "post_mlp_layernorm"}

_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    QUERY_SCALING: 0.1,
}
"""Defaults of `transformers`."""


def minicpm3_settings(config: Config) -> DecoderSettings:
    """MiniCPM3, of which each part, embeddings and logits have factors. Its `head_dim` is not used,
    as in `transformers`."""
    config.get("head_dim")
    num_layers, size = config["num_hidden_layers"], config["hidden_size"]
    value_dim = config.get("v_head_dim") or size // config["num_attention_heads"]
    defaults = with_keys(config, {}, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32)
    depth = config.get("scale_depth", 1.4)
    return latent_decoder(
        with_values(defaults, v_head_dim=value_dim, rope_interleave=False),
        [gated_mlp(config)] * num_layers,
        query_latent_dim=768,
        eps=1e-5,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        residual_multiplier=1.0 if depth is None else depth / num_layers**0.5,
        embedding_scale=float(config.get("scale_emb", 12)),
        logits_scale=(config.get("dim_model_base", 256) or size) / size,
    )


def deepseek_v32_settings(config: Config) -> DecoderSettings:
    """DeepSeek-V3.2: DeepSeek-V3, where an indexer chooses the tokens that a token sees. It chooses
    all of sequences of up to `index_topk` tokens, which are the longest ones here."""
    require(config, "mlp_bias", False)
    require(config, "head_dim", config.get("qk_rope_head_dim", 64))
    experts = scored_experts(config, num_experts=256, num_groups=8, num_chosen_groups=4, scale=2.5)
    dense = gated_mlp(config, bias=False)
    has_experts = have_experts(config, config.get("first_k_dense_replace", 3))
    return latent_decoder(
        config,
        [experts if is_sparse else dense for is_sparse in has_experts],
        max_model_len=min(config.get("index_topk", 2048), config["max_position_embeddings"]),
        unused_names=r".*\.self_attn\.indexer\..*",
    )


def glm_moe_dsa_settings(config: Config) -> DecoderSettings:
    """GLM-5, which has other defaults."""
    sizes = {"q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192}
    groups = {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 2048}
    return deepseek_v32_settings(with_keys(config, {}, rms_norm_eps=1e-5, **sizes, **groups))


def axk1_settings(config: Config) -> DecoderSettings:
    """A.X-K1: DeepSeek-V3, where the output of experts has a norm. Published checkpoints have no
    correction of scores, but the norm in layers without experts, too, which do not use it."""
    require(config, "head_dim", config.get("qk_rope_head_dim", 64))
    require(config, "moe_layer_freq", 1)
    experts = scored_experts(
        with_values(config, topk_method=None),  # corrections are what says it
        num_experts=192,
        num_groups=8,
        num_chosen_groups=4,
        scale=2.5,
    )
    experts = replace(experts, corrects=config.get(CORRECTIONS, True))
    dense = gated_mlp(config, bias=False)
    has_experts = have_experts(config, config.get("first_k_dense_replace", 1))
    of_dense = "|".join(str(i) for i, is_sparse in enumerate(has_experts) if not is_sparse)
    return latent_decoder(
        config,
        [experts if is_sparse else dense for is_sparse in has_experts],
        expert_names=_AXK1_NAMES,
        unused_names=rf"model\.layers\.(?:{of_dense})\.post_mlp_layernorm\.weight",
    )


def mistral4_settings(config: Config) -> DecoderSettings:
    """The text model of Mistral 4. In GGUF files, experts have modules of their own."""
    has_modules = bool(config.get("has_expert_modules"))
    experts = experts_of(
        config,
        num_experts=128,
        num_shared=1,
        inner_size=2048,
        **grouped(config) | {"scoring": "softmax"},
        storage=ExpertStorage.SEPARATE if has_modules else ExpertStorage.STACK,
        has_float_router=False,
    )
    return latent_decoder(
        with_keys(
            config, {}, kv_lora_rank=256, qk_nope_head_dim=64, rope_parameters=_MISTRAL4_ROPE
        ),
        first_dense(config, experts, 0),
        query_latent_dim=1024,
        rotary_is_partial=True,
        expert_names=EXPERT_NAMES if has_modules else _STACK_NAMES,
    )
