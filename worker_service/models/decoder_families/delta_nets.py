"""Families of which three of four layers have a gated delta net in place of attention. Qwen3-Next
and Qwen3.5, dense and with experts, are Qwen3 with gated attention, and have a module of their own
that drafts tokens. OLMo Hybrid has OLMo 2's layers."""

from worker_service.models.decoder.specs import (
    DecoderSettings,
    FeedForwardSpec,
    LayerSpec,
    NormPlace,
)
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    STACKED_EXPERTS,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    head_dim_of,
    layer_types,
    mixture_of,
    require,
    rotary_of,
    with_keys,
)
from worker_service.models.decoder_families.draft_heads import qwen_head
from worker_service.models.decoder_families.llama_kin import OUTPUT_NORMS
from worker_service.models.decoder_families.mixtures import QWEN_SHARED_NAMES, STACK_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.delta_net import DeltaStorage, GatedDeltaNetSpec

_LINEAR = "linear_attention"
"""In `layer_types`."""

_DELTA_NAMES = by_lines("""
attention.convolution   linear_attn.conv1d
attention.decay         linear_attn.A_log
attention.decay_bias    linear_attn.dt_bias
attention.norm          linear_attn.norm
attention.output        linear_attn.out_proj
""")

_SEPARATE, _JOINED = "linear_attn.in_proj_qkv linear_attn.in_proj_z", "linear_attn.in_proj_qkvz"
_GATES = "linear_attn.in_proj_ba"
_STORED = {
    DeltaStorage.SEPARATE: {
        "attention.inputs": _SEPARATE,
        "attention.gates": "linear_attn.in_proj_b linear_attn.in_proj_a",
    },
    DeltaStorage.BY_KEY_HEAD: {"attention.inputs": _JOINED, "attention.gates": _GATES},
    DeltaStorage.GATES_BY_KEY_HEAD: {"attention.inputs": _SEPARATE, "attention.gates": _GATES},
}


_OLMO_NAMES = by_lines("""
attention_norm          input_layernorm
feed_forward_norm       post_attention_layernorm
feed_forward.up         mlp.gate_proj mlp.up_proj
feed_forward.down       mlp.down_proj
attention.inputs        linear_attn.q_proj linear_attn.k_proj linear_attn.v_proj linear_attn.g_proj
attention.gates         linear_attn.b_proj linear_attn.a_proj
attention.convolution   linear_attn.q_conv1d linear_attn.k_conv1d linear_attn.v_conv1d
attention.decay         linear_attn.A_log
attention.decay_bias    linear_attn.dt_bias
attention.norm          linear_attn.o_norm
attention.output        linear_attn.o_proj
""")


def olmo_hybrid_settings(config: Config) -> DecoderSettings:
    """OLMo Hybrid: layers with attention as in OLMo 2, in published checkpoints without RoPE, and
    layers with a gated delta net, whose norms are before each part."""
    require(config, "hidden_act", "silu")  # of the convolutions, too
    num_heads, norm = config["num_attention_heads"], NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    num_key_heads = config.get("linear_num_key_heads") or num_heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / num_key_heads)
    delta_net = GatedDeltaNetSpec(
        num_key_heads=num_key_heads,
        num_heads=config.get("linear_num_value_heads") or num_heads,
        key_dim=key_dim,
        value_dim=config.get("linear_value_head_dim") or 2 * key_dim,
        width=config.get("linear_conv_kernel_dim", 4),
        eps=1e-5,  # whatever `rms_norm_eps` is
        storage=DeltaStorage.BY_PART,
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )
    head_dim = head_dim_of(config)
    rope, mlp = config.get("rope_parameters") or {}, gated_mlp(config, bias=False)
    has_rope = rope.get("rope_theta", 1.0) is not None
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim) if has_rope else None,
        head_norm=norm,
        norm_spans_heads=True,
        **biases_of(config),
    )
    layers = {
        FULL: LayerSpec(
            attention=attention,
            feed_forward=mlp,
            norm=norm,
            norm_place=NormPlace.AFTER,
            names=OUTPUT_NORMS,
        ),
        _LINEAR: LayerSpec(attention=delta_net, feed_forward=mlp, norm=norm, names=_OLMO_NAMES),
    }
    return decoder_of(config, [layers[kind] for kind in _kinds(config)], norm)


def qwen3_next_settings(config: Config) -> DecoderSettings:
    """Qwen3-Next. Inputs are separate in GGUF files."""
    is_separate = config.get("has_separate_inputs", False)
    config = with_keys(config, {}, num_experts=512, num_experts_per_tok=10, num_key_value_heads=2)
    normalizes = bool(config.get("norm_topk_prob", True))
    sparse = _experts(config, ExpertStorage.SEPARATE, normalizes=normalizes)
    mlp_layers, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    num_experts, dense = config["num_experts"], gated_mlp(config, bias=False)
    parts: list[FeedForwardSpec] = [
        sparse if i not in mlp_layers and num_experts > 0 and (i + 1) % step == 0 else dense
        for i in range(config["num_hidden_layers"])
    ]
    by_key_head = DeltaStorage.BY_KEY_HEAD
    storage = DeltaStorage.GATES_BY_KEY_HEAD if is_separate else by_key_head
    return _decoder(config, parts, storage)


def qwen3_5_settings(config: Config) -> DecoderSettings:
    """Qwen3.5."""
    config = with_keys(config, {}, num_key_value_heads=4)
    parts: list[FeedForwardSpec] = [gated_mlp(config, bias=False)] * config["num_hidden_layers"]
    return _decoder(config, parts, DeltaStorage.SEPARATE)


def qwen3_5_moe_settings(config: Config) -> DecoderSettings:
    """Qwen3.5 with experts."""
    config = with_keys(config, {}, num_experts=256, num_experts_per_tok=8, num_key_value_heads=2)
    is_stacked = config.get(STACKED_EXPERTS, False)
    storage = ExpertStorage.STACK if is_stacked else ExpertStorage.SEPARATE
    experts = _experts(config, storage, normalizes=True)
    parts: list[FeedForwardSpec] = [experts] * config["num_hidden_layers"]
    return _decoder(config, parts, DeltaStorage.SEPARATE)


def _experts(config: Config, storage: ExpertStorage, *, normalizes: bool) -> ExpertsSpec:
    return mixture_of(
        config,
        num_experts=config["num_experts"],
        num_chosen=config["num_experts_per_tok"],
        normalizes=normalizes,
        inner_size=config.get("moe_intermediate_size", 512),
        shared=SharedSpec(
            inner_size=config.get("shared_expert_intermediate_size", 512), is_gated=True
        ),
        storage=storage,
    )


def _decoder(
    config: Config, parts: list[FeedForwardSpec], storage: DeltaStorage
) -> DecoderSettings:
    """parts: what follows attention, by layer."""
    require(config, "hidden_act", "silu")  # of the convolutions, too
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6), offset=1.0)
    config = with_keys(config, {}, head_dim=256, max_position_embeddings=32768)
    head_dim = config["head_dim"]
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim, partial=0.25),
        **biases_of(config),
        head_norm=norm,
        gates_output=True,
    )
    delta_net = GatedDeltaNetSpec(
        num_key_heads=config.get("linear_num_key_heads", 16),
        num_heads=config.get("linear_num_value_heads", 32),
        key_dim=config.get("linear_key_head_dim", 128),
        value_dim=config.get("linear_value_head_dim", 128),
        width=config.get("linear_conv_kernel_dim", 4),
        eps=norm.eps,
        storage=storage,
    )

    def layer(kind: str, part: FeedForwardSpec) -> LayerSpec:
        of_part = NAMES
        if isinstance(part, ExpertsSpec):
            of_part = QWEN_SHARED_NAMES
            if part.storage is ExpertStorage.STACK:
                of_part = of_part | STACK_NAMES
        names = {path: name for path, name in of_part.items() if not path.startswith("attention.")}
        own = _ATTENTION_NAMES if kind == FULL else _DELTA_NAMES | _STORED[storage]
        return LayerSpec(
            attention=attention if kind == FULL else delta_net,
            feed_forward=part,
            norm=norm,
            names=names | own,
        )

    layers = [layer(kind, part) for kind, part in zip(_kinds(config), parts, strict=True)]
    head = qwen_head(layer(FULL, parts[0]))
    return decoder_of(config, layers, norm, ignores_further_layers=True, draft_head=head)


_ATTENTION_NAMES = {path: name for path, name in NAMES.items() if path.startswith("attention.")}


def _kinds(config: Config) -> list[str]:
    """The type of each layer."""
    num_layers, period = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    default = [_LINEAR if layer % period else FULL for layer in range(1, num_layers + 1)]
    return layer_types(config, default, (FULL, _LINEAR))
