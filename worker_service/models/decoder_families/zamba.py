"""Zamba2: Mamba-2, in some layers behind attention and an MLP, whose weights these share."""

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    NotNative,
    attention_of,
    by_lines,
    decoder_of,
    require,
    rotary_of,
    with_keys,
)
from worker_service.models.decoder_families.mamba import MAMBA2_NAMES, mamba2_of
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.shared_block import SharedBlockSpec

_HYBRID = "hybrid"
_MAMBA = ("linear_attention", "mamba")
"""Types of layers; the second one of Mamba's in older checkpoints."""

_NAMES = {"attention_norm": "input_layernorm", **MAMBA2_NAMES}

_HYBRID_NAMES = by_lines("""
attention.linear      linear
attention.mamba_norm  mamba_decoder.input_layernorm
""") | {
    path.replace("attention.", "attention.mamba."): f"mamba_decoder.{name}"
    for path, name in MAMBA2_NAMES.items()
}

_BLOCK = (
    "input_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    "pre_ff_layernorm",
    "feed_forward.gate_up_proj",
    "feed_forward.down_proj",
)


def zamba2_settings(config: Config) -> DecoderSettings:
    """Zamba2. The first layer with a block holds its tensors, those of the low rank products of all
    layers that share it among them."""
    if config.get("use_long_context"):
        raise NotNative("use_long_context")
    # Otherwise transformers does not tie blocks to each other, either.
    require(config, "tie_word_embeddings", True)
    config = with_keys(config, {}, max_position_embeddings=4096, num_mem_blocks=1, hidden_size=2560)
    size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    kinds = config.get("layers_block_type") or config.get("layer_types") or _default_kinds()
    if len(kinds) != num_layers or not set(kinds) <= {_HYBRID, *_MAMBA}:
        raise UnsupportedModel(
            f"config.json: layers_block_type: expected {_MAMBA[0]} or {_HYBRID} for each of"
            f" {num_layers} layers, got {', '.join(map(str, kinds))}"
        )
    norm, bias = NormSpec(eps=config.get("rms_norm_eps", 1e-5)), config.get("add_bias_linear")
    head_dim = config.get("attention_head_dim") or 2 * size // config["num_attention_heads"]
    num_heads, inner = config.get("n_mamba_heads", 8), int(config.get("mamba_expand", 2) * size)
    mamba = mamba2_of(
        {"time_step_limit": (config.get("time_step_min", 0.001), float("inf"))},
        num_heads=num_heads,
        head_dim=config.get("mamba_headdim") or inner // num_heads,
        num_groups=config.get("mamba_ngroups", 1),
        state_size=config.get("mamba_d_state", 64),
        width=config.get("mamba_d_conv", 4),
        bias=bool(bias),
        output_bias=bool(bias),
        norm=NormSpec(eps=1e-5),
    )
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim) if config.get("use_mem_rope") else None,
        scale=(head_dim / 2) ** -0.5,
    )
    hybrids = [layer for layer, kind in enumerate(kinds) if kind == _HYBRID]
    adapts = bool(config.get("use_shared_attention_adapter", False))

    def hybrid(index: int) -> LayerSpec:
        """index: of the layer among the hybrid ones."""
        block = index % config["num_mem_blocks"]
        mixer = SharedBlockSpec(
            block=block,
            attention=attention,
            inner_size=config.get("intermediate_size") or 4 * size,
            activation=config.get("hidden_act", "gelu"),
            bias=bool(bias),
            rank=config.get("adapter_rank", 128),
            adapts_attention=adapts,
            mamba=mamba,
            norm=norm,
        )
        names = _block_names(f"model.layers.{hybrids[block]}.shared_transformer", index, adapts)
        return LayerSpec(
            attention=mixer,
            feed_forward=None,
            norm=norm,
            norms_attention=False,
            names=names | _HYBRID_NAMES,
        )

    plain = LayerSpec(attention=mamba, feed_forward=None, norm=norm, names=_NAMES)
    return decoder_of(
        config,
        [hybrid(hybrids.index(i)) if i in hybrids else plain for i in range(num_layers)],
        norm,
        keeps_embedding=True,
        unused_names=_copies([str(layer) for layer in hybrids[: config["num_mem_blocks"]]]),
        tie_word_embeddings=True,
    )


def _block_names(prefix: str, index: int, adapts_attention: bool) -> dict[str, str]:
    """Names of a block, and of what the layer of this index adds to its products."""
    up = f"{prefix}.feed_forward.gate_up_proj_adapter_list.{index}"
    names = {
        "attention.block": " ".join(f"{prefix}.{name}" for name in _BLOCK),
        "attention.up.narrow": f"{up}.0",
        "attention.up.wide.0": f"{up}.1",
    }
    if adapts_attention:
        parts = [f"{prefix}.self_attn.linear_{part}_adapter_list.{index}" for part in "qkv"]
        names["attention.attention.qkv.narrow"] = " ".join(f"{part}.0" for part in parts)
        names |= {f"attention.attention.qkv.wide.{i}": f"{p}.1" for i, p in enumerate(parts)}
    return names


def _copies(first: list[str]) -> str:
    """A pattern of names of blocks in other layers than the first ones, which have copies."""
    return rf"model\.layers\.(?!(?:{'|'.join(first)})\.)\d+\.shared_transformer\..*"


def _default_kinds() -> list[str]:
    """Of Zamba2-2.7B."""
    counts = (6, *[5] * 6, 4, 3)
    layers = [kind for count in counts for kind in (*[_MAMBA[0]] * count, _HYBRID)]
    return [*layers, *[_MAMBA[0]] * 2]
