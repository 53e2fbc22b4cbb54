"""GPT-2 (Radford et al. 2019), GPT-BigCode (StarCoder, Li et al. 2023), GPT-Neo (Black et al. 2021)
and OPT (Zhang et al. 2022): learned positions, layer norms, a plain MLP."""

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, NormPlace
from worker_service.models.decoder_families.common import (
    Config,
    attention_of,
    by_lines,
    decoder_of,
    with_keys,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import AttentionSpec, QKVStorage

_OPT_POSITION_OFFSET = 2
"""The first rows of OPT's position table are unused."""

_OPT_NAMES = by_lines("""
attention_norm     self_attn_layer_norm
attention.qkv      self_attn.q_proj self_attn.k_proj self_attn.v_proj
attention.output   self_attn.out_proj
feed_forward_norm  final_layer_norm
feed_forward.up    fc1
feed_forward.down  fc2
""")

_GPT2_NAMES = by_lines("""
attention_norm     ln_1
attention.qkv      attn.c_attn
attention.output   attn.c_proj
feed_forward_norm  ln_2
feed_forward.up    mlp.c_fc
feed_forward.down  mlp.c_proj
""")

_GPT_NEO_NAMES = _GPT2_NAMES | by_lines("""
attention.qkv      attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj
attention.output   attn.attention.out_proj
""")


def opt_settings(config: Config) -> DecoderSettings:
    """OPT. Only OPT-350m has norms after attention and MLP, and an embedding narrower than the
    hidden states."""
    norm_first = config.get("do_layer_norm_before", True)
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_layers, bias = config["num_hidden_layers"], config.get("enable_bias", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    norm = NormSpec(eps=1e-5, is_rms=False, affine=affine)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=size // num_heads,
            scale=(size // num_heads) ** -0.5,
            qkv_bias=bias,
            output_bias=bias,
        ),
        feed_forward=MLPSpec(
            inner_size=config["ffn_dim"],
            activation=config.get("activation_function", "relu"),
            is_gated=False,
            bias=bias,
        ),
        norm=norm,
        norm_place=NormPlace.BEFORE if norm_first else NormPlace.AFTER_SUM,
        names=_OPT_NAMES,
    )
    has_final_norm = norm_first and not config.get("_remove_final_layer_norm", False)
    return DecoderSettings(
        architecture="OPTForCausalLM",
        vocab_size=config["vocab_size"],
        hidden_size=size,
        embedding_size=config.get("word_embed_proj_dim") or size,
        num_layers=num_layers,
        max_model_len=config["max_position_embeddings"],
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        layers=(layer,) * num_layers,
        final_norm=norm if has_final_norm else None,
        position_offset=_OPT_POSITION_OFFSET,
    )


def gpt2_settings(config: Config) -> DecoderSettings:
    """GPT-2: queries, keys and values are one tensor, and weights are transposed, but in GGUF files
    (`has_linear_layers`). GPT-BigCode, of which they are not, has one head of keys for all queries,
    or these by head."""
    if config.get("add_cross_attention"):
        raise UnsupportedModel(
            "config.json: add_cross_attention: expected false, since only decoder-only models are"
            " supported, got true"
        )
    size, num_layers, num_heads = config["n_embd"], config["n_layer"], config["n_head"]
    head_dim = size // num_heads
    scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    is_bigcode = config["architectures"][0] == "GPTBigCodeForCausalLM"
    has_one_key = is_bigcode and bool(config.get("multi_query", True))
    by_group = is_bigcode and not has_one_key
    by_layer = not is_bigcode and config.get("scale_attn_by_inverse_layer_idx", False)
    norm = NormSpec(eps=config.get("layer_norm_epsilon", 1e-5), is_rms=False)
    default = "gelu_pytorch_tanh" if is_bigcode else "gelu_new"
    mlp = MLPSpec(
        inner_size=config.get("n_inner") or 4 * size,
        activation=config.get("activation_function", default),
        is_gated=False,
        bias=True,
    )

    def layer(index: int) -> LayerSpec:
        attention = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=1 if has_one_key else num_heads,
            head_dim=head_dim,
            scale=scale / (index + 1) if by_layer else scale,
            qkv_bias=True,
            output_bias=True,
            storage=QKVStorage.BY_GROUP if by_group else QKVStorage.CONSECUTIVE,
        )
        return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=_GPT2_NAMES)

    return DecoderSettings(
        architecture=config["architectures"][0],
        vocab_size=config["vocab_size"],
        hidden_size=size,
        embedding_size=size,
        num_layers=num_layers,
        max_model_len=config["n_positions"],
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        layers=tuple(map(layer, range(num_layers))),
        final_norm=norm,
        position_offset=0,
        is_transposed=not is_bigcode and not config.get("has_linear_layers"),
    )


def gpt_neo_settings(config: Config) -> DecoderSettings:
    """GPT-Neo: attention scores without a scale, and windows in every second layer, or in those
    that `attention_types` says: groups of types, each repeated."""
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    config = with_keys(config, names)
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_layers = config["num_hidden_layers"]
    groups = config.get("attention_types") or [[["global", "local"], num_layers // 2]]
    kinds = [kind for group, count in groups for kind in group * count]
    if len(kinds) != num_layers or not set(kinds) <= {"global", "local"}:
        raise UnsupportedModel(
            f"config.json: attention_types: expected global or local for each of {num_layers}"
            f" layers, got {groups}"
        )
    norm = NormSpec(eps=config.get("layer_norm_epsilon", 1e-5), is_rms=False)
    mlp = MLPSpec(
        inner_size=config.get("intermediate_size") or 4 * size,
        activation=config.get("activation_function", "gelu_new"),
        is_gated=False,
        bias=True,
    )

    def layer(kind: str) -> LayerSpec:
        attention = attention_of(
            config,
            size // num_heads,
            None,
            num_kv_heads=num_heads,
            scale=1.0,
            window=config.get("window_size", 256) if kind == "local" else None,
            output_bias=True,
        )
        return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=_GPT_NEO_NAMES)

    return decoder_of(
        config,
        [layer(kind) for kind in kinds],
        norm,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        position_offset=0,
    )
