"""Lara 4 Mini: layers with a gated delta net, layers with windows, and layers with full attention,
which have no RoPE; Qwen3's norms of heads, and experts in all layers."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    SLIDING,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    layer_types,
    mixture_of,
    require,
    rotary_of,
    unrotated,
    with_keys,
)
from worker_service.models.decoder_families.mixtures import QWEN_NAMES, STACK_NAMES
from worker_service.models.feed_forward.experts import ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.delta_net import DeltaStorage, GatedDeltaNetSpec

_LINEAR = "linear_attention"
"""In `layer_types`."""

_PATTERN = (_LINEAR, SLIDING, _LINEAR, FULL, SLIDING)

_ATTENTION_NAMES = (
    QWEN_NAMES
    | STACK_NAMES
    | by_lines("""
feed_forward.shared.up    mlp.shared_expert.gate_proj mlp.shared_expert.up_proj
feed_forward.shared.down  mlp.shared_expert.down_proj
""")
)

_DELTA_NAMES = {
    path: name for path, name in _ATTENTION_NAMES.items() if not path.startswith("attention.")
} | by_lines("""
attention.inputs        linear_attn.in_proj
attention.gates         linear_attn.in_proj
attention.convolution   linear_attn.conv1d
attention.decay         linear_attn.A_log
attention.decay_bias    linear_attn.dt_bias
attention.norm          linear_attn.out_norm
attention.output        linear_attn.out_proj
""")


def lara_mini_settings(config: Config) -> DecoderSettings:
    """Lara 4 Mini."""
    require(config, "hidden_act", "silu")  # of the convolutions, too
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=4, tie_word_embeddings=True)
    head_dim, norm = config["head_dim"], NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    rotary = rotary_of(config, head_dim)
    experts = mixture_of(
        config,
        num_experts=config.get("num_experts", 128),
        num_chosen=config.get("num_experts_per_tok", 4),
        normalizes=bool(config.get("norm_topk_prob", True)),
        inner_size=config.get("moe_intermediate_size", 512),
        activation="silu",
        shared=SharedSpec(inner_size=config.get("shared_expert_intermediate_size", 512)),
        storage=ExpertStorage.STACK,
    )
    delta_net = GatedDeltaNetSpec(
        num_key_heads=config.get("linear_num_key_heads", 8),
        num_heads=config.get("linear_num_value_heads", 16),
        key_dim=config.get("linear_key_head_dim", 128),
        value_dim=config.get("linear_value_head_dim", 128),
        width=config.get("linear_conv_kernel_dim", 4),
        eps=norm.eps,
        storage=DeltaStorage.JOINED,
    )
    attentions = {
        kind: attention_of(
            config,
            head_dim,
            rotary if kind == SLIDING else unrotated(rotary),
            window=config.get("sliding_window", 512) if kind == SLIDING else None,
            **biases_of(config),
            head_norm=norm,
        )
        for kind in (SLIDING, FULL)
    }
    default = [_PATTERN[layer % len(_PATTERN)] for layer in range(config["num_hidden_layers"])]
    layers = [
        LayerSpec(
            attention=delta_net if kind == _LINEAR else attentions[kind],
            feed_forward=experts,
            norm=norm,
            names=_DELTA_NAMES if kind == _LINEAR else _ATTENTION_NAMES,
        )
        for kind in layer_types(config, default, (_LINEAR, SLIDING, FULL))
    ]
    return decoder_of(config, layers, norm, max_model_len=rotary.max_model_len())
