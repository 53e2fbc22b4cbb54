"""MiniMax-M3: attention as far as it is not sparse; MLPs and experts, whose gates have a limit."""

from pagewire_kernels.reference import Gate
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, FeedForwardSpec, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    STACKED_EXPERTS,
    Config,
    attention_of,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    mixture_of,
    rotary_of,
    with_keys,
)
from worker_service.models.decoder_families.mixtures import MIXTRAL_NAMES, QWEN_NAMES, STACK_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec

SPARSE = "minimax_m3_sparse"
"""In `layer_types`."""

_SHARED = "block_sparse_moe.shared_experts"
_EXPERT_NAMES = MIXTRAL_NAMES | by_lines(f"""
feed_forward.correction   block_sparse_moe.e_score_correction_bias
feed_forward.shared.up    {_SHARED}.gate_proj {_SHARED}.up_proj
feed_forward.shared.down  {_SHARED}.down_proj
""")

_STACKED_MLP_NAMES = NAMES | {"feed_forward.up": "mlp.gate_up_proj"}
_STACKED_NAMES = (QWEN_NAMES | STACK_NAMES) | by_lines("""
feed_forward.correction   mlp.gate.e_score_correction_bias
feed_forward.shared.up    mlp.shared_experts.gate_up_proj
feed_forward.shared.down  mlp.shared_experts.down_proj
""")
"""As `transformers` writes the text model alone."""

_SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "max_position_embeddings": 524_288,
}
"""Defaults of `transformers`."""


def minimax_m3_settings(config: Config) -> DecoderSettings:
    """MiniMax-M3. In some layers indexers choose blocks of tokens that a token sees: all blocks of
    sequences of up to `index_topk_blocks` of them, which are the longest ones here."""
    config = with_keys(config, {}, **_SIZES)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6), offset=1.0)
    rotary = rotary_of(config, config["head_dim"], theta=5e6, partial=1.0)
    rotary_dim = config.get("rotary_dim", rotary.rotary_dim)
    if rotary_dim != rotary.rotary_dim:
        raise UnsupportedModel(
            f"config.json: rotary_dim: expected {rotary.rotary_dim}, the part of head_dim that"
            f" partial_rotary_factor is, got {rotary_dim}"
        )
    attention = attention_of(config, config["head_dim"], rotary, head_norm=norm)
    is_stacked = bool(config.get(STACKED_EXPERTS))
    gate = Gate(
        limit=float(config.get("swiglu_limit", 7.0)),
        alpha=float(config.get("swiglu_alpha", 1.702)),
        offset=1.0,
    )
    dense = gated_mlp(
        config,
        inner_size=config["dense_intermediate_size"],
        activation="silu",
        bias=False,
        is_fused=is_stacked,
        gate=gate,
    )
    experts = _experts(config, gate, is_stacked=is_stacked)

    def layer(part: FeedForwardSpec) -> LayerSpec:
        if isinstance(part, ExpertsSpec):
            names = _STACKED_NAMES if is_stacked else _EXPERT_NAMES
        else:
            names = _STACKED_MLP_NAMES if is_stacked else NAMES
        return LayerSpec(attention=attention, feed_forward=part, norm=norm, names=names)

    layers = [layer(experts if is_sparse else dense) for is_sparse in have_experts(config, 0)]
    length = rotary.max_model_len()
    if SPARSE in layer_types(config, [FULL] * len(layers), (SPARSE, FULL)):
        length = min(
            length, config.get("index_topk_blocks", 16) * config.get("index_block_size", 128)
        )
    unused = r".*\.self_attn\.index(?:er\.[qk]|_[qk])_(?:proj|norm)\.weight"
    return decoder_of(config, layers, norm, max_model_len=length, unused_names=unused)


def _experts(config: Config, gate: Gate, *, is_stacked: bool) -> ExpertsSpec:
    return mixture_of(
        config,
        num_experts=config["num_local_experts"],
        num_chosen=config["num_experts_per_tok"],
        scoring="sigmoid",
        normalizes=True,
        scale=float(config.get("routed_scaling_factor", 2.0)),
        inner_size=config["intermediate_size"],
        activation="silu",
        corrects=True,
        gate=gate,
        shared=SharedSpec(
            inner_size=config["shared_intermediate_size"], is_fused=is_stacked, gate=gate
        ),
        storage=ExpertStorage.STACK if is_stacked else ExpertStorage.SEPARATE,
    )
