"""Muse Glimmer, the text model: normed embeddings, attention with norms of queries and keys, which
some layers do not rotate, and with gates of its output, and norms around each part."""

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, NormPlace
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    attention_of,
    by_lines,
    decoder_of,
    gated_mlp,
    layer_types,
    require,
    rotary_of,
    unrotated,
    with_keys,
)
from worker_service.models.layers.norms import NormSpec

_NAMES = {path: name for path, name in NAMES.items() if "_norm" not in path} | by_lines("""
attention_norm            input_layernorm
attention.qkv             self_attn.q_proj self_attn.gate_proj self_attn.k_proj self_attn.v_proj
attention_output_norm     post_attention_layernorm
feed_forward_norm         pre_feedforward_layernorm
feed_forward_output_norm  post_feedforward_layernorm
""")

_SIZES = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
}
"""Defaults of `transformers`."""


def muse_glimmer_settings(config: Config) -> DecoderSettings:
    """Muse Glimmer. A base of RoPE of 0 says that a layer has none; others are the same."""
    require(config, "attention_bias", False)
    config = with_keys(config, {}, **_SIZES)
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    eps = config.get("rms_norm_eps", 1e-5)
    rotary = rotary_of(config, head_dim)
    is_fourth = [(num_layers - 1 - i) % 4 == 0 for i in range(num_layers)]
    kinds = layer_types(config, [FULL if is_last else SLIDING for is_last in is_fourth])
    rotates = _rotates(config, rotary.theta, [not is_last for is_last in is_fourth])
    attentions = [
        attention_of(
            config,
            head_dim,
            rotary if is_rotated else unrotated(rotary),
            scale=head_dim**-0.5 * float(config.get("qk_scale_factor", 3.87)),
            window=config["sliding_window"] if kind == SLIDING else None,
            head_norm=NormSpec(eps=eps, affine=False),
            gates_output=True,
            gate_is_separate=True,
        )
        for kind, is_rotated in zip(kinds, rotates, strict=True)
    ]
    layers = [
        LayerSpec(
            attention=attention,
            feed_forward=gated_mlp(
                config, activation=config.get("hidden_activation", "silu"), bias=False
            ),
            norm=NormSpec(eps=eps, offset=1.0),
            output_norm=NormSpec(eps=config.get("post_norm_eps", 1e-8), offset=1.0),
            norm_place=NormPlace.AROUND,
            names=_NAMES,
        )
        for attention in attentions
    ]
    return decoder_of(
        config,
        layers,
        NormSpec(eps=eps),
        max_model_len=rotary.max_model_len(),
        scales_virtual_tokens=None,  # which have no norm in `transformers`
        embedding_norm=NormSpec(eps=eps, affine=False),
        logits_scale=float(config.get("output_multiplier", 0.19611613513818404)),
        logits_soft_cap=float(config.get("final_logit_softcapping", 20.0)),
    )


def _rotates(config: Config, theta: float, default: list[bool]) -> list[bool]:
    """Whether each layer has RoPE. Raises UnsupportedModel for another base than that of all."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return default
    if len(thetas) != len(default) or not {*thetas} <= {0, theta}:
        raise UnsupportedModel(
            f"config.json: layer_rope_theta: expected 0 or {theta:g}, as rope_theta, of each of"
            f" {len(default)} layers, got {', '.join(map(str, thetas))}"
        )
    return [theta > 0 for theta in thetas]
