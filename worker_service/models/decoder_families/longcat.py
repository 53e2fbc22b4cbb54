"""LongCat-Flash: layers of two latent attentions and two MLPs, with experts beside the second half,
some of which return their inputs (Meituan LongCat Team 2025)."""

from collections.abc import Mapping
from dataclasses import replace

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    by_lines,
    decoder_of,
    gated_mlp,
    mixture_of,
    require,
    with_keys,
)
from worker_service.models.decoder_families.latent import latent_attention
from worker_service.models.feed_forward.experts import ExpertsSpec
from worker_service.models.layers.norms import NormSpec

_HALF_NAMES = by_lines("""
attention_norm          input_layernorm.{0}
attention.inputs        self_attn.{0}.q_a_proj self_attn.{0}.kv_a_proj_with_mqa
attention.query_norm    self_attn.{0}.q_a_layernorm
attention.query         self_attn.{0}.q_b_proj
attention.latent_norm   self_attn.{0}.kv_a_layernorm
attention.expansion     self_attn.{0}.kv_b_proj
attention.output        self_attn.{0}.o_proj
feed_forward_norm       post_attention_layernorm.{0}
feed_forward.up         mlps.{0}.gate_proj mlps.{0}.up_proj
feed_forward.down       mlps.{0}.down_proj
""")

_EXPERT_NAMES = by_lines("""
shortcut.router         mlp.router.classifier
shortcut.experts        mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.experts.*.down_proj
shortcut.correction     mlp.router.e_score_correction_bias
""")


def _half(index: int, prefix: str) -> Mapping[str, str]:
    return {f"{prefix}{path}": names.format(index) for path, names in _HALF_NAMES.items()}


_NAMES = {**_half(0, ""), **_half(1, "second."), **_EXPERT_NAMES}

_USUAL_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
}


def longcat_flash_settings(config: Config) -> DecoderSettings:
    """LongCat-Flash. Latents have factors, whatever `mla_scale_q_lora` and `mla_scale_kv_lora` are
    in `transformers`."""
    config = with_keys(config, _USUAL_KEYS, num_hidden_layers=28, rope_theta=1e7)
    head_dim = config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64)
    require(config, "head_dim", config.get("qk_rope_head_dim", 64))
    require(config, "qk_head_dim", head_dim)
    require(config, "mla_scale_q_lora", True)
    require(config, "mla_scale_kv_lora", True)
    require(config, "router_bias", False)
    require(config, "zero_expert_type", "identity")
    norm, size = NormSpec(eps=config.get("rms_norm_eps", 1e-5)), config["hidden_size"]
    attention = latent_attention(config, 1536)
    attention = replace(
        attention,
        scale=attention.scale * (size / config.get("q_lora_rank", 1536)) ** 0.5,
        latent_scale=(size / attention.latent_dim) ** 0.5,
    )
    half = LayerSpec(
        attention=attention, feed_forward=gated_mlp(config, bias=False), norm=norm, names={}
    )
    experts = _experts(config)
    layer = replace(half, names=_NAMES, second=half, shortcut=experts)
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        unused_names=_unused_names(experts),
    )


def _experts(config: Config) -> ExpertsSpec:
    num_zero = config.get("zero_expert_num", 256) or 0
    return mixture_of(
        config,
        num_experts=config.get("n_routed_experts", 512) + num_zero,
        num_zero_experts=num_zero,
        num_chosen=config.get("moe_topk", 12),
        scale=float(config.get("routed_scaling_factor", 6.0)),
        inner_size=config.get("expert_ffn_hidden_size", 2048),
        corrects=True,
        has_float_router=True,
    )


def _unused_names(experts: ExpertsSpec) -> str:
    """Layers that predict further tokens, and weights that `transformers` writes for zero
    experts."""
    routing = experts.routing
    zero = "|".join(map(str, range(routing.num_with_weights, routing.num_experts)))
    return rf"model\.mtp\..*|model\.layers\.\d+\.mlp\.experts\.(?:{zero})\..*"
