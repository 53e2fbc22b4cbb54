"""Hunyuan 4 (`HYV4`): hyper-connections, latent attention with sinks and gates, as far as it is not
sparse, and experts as in DeepSeek-V3, whose gates have a limit."""

from dataclasses import replace

from pagewire_kernels.reference import Gate
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.hyper import HyperConnectionsSpec
from worker_service.models.decoder.specs import DecoderSettings
from worker_service.models.decoder_families.common import (
    Config,
    NotNative,
    by_lines,
    gated_mlp,
    have_experts,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.latent import (
    EXPERT_NAMES,
    latent_attention,
    latent_decoder,
    scored_experts,
)
from worker_service.models.decoder_families.mixtures import STACK_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage
from worker_service.models.mixers.latent_attention import OutputGates

_NAMES = by_lines("""
attention.inputs        self_attn.q_a_proj self_attn.kv_a_proj_with_mqa self_attn.gate_proj
attention.sinks         self_attn.sinks
attention_streams       attn_hc.fn attn_hc.base attn_hc.scale
feed_forward_streams    ffn_hc.fn ffn_hc.base ffn_hc.scale
""")

_KIND = "indexed_attention"

_SIZES = {
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262_144,
}
"""Defaults of `transformers`."""


def hy_v4_settings(config: Config) -> DecoderSettings:
    """Hunyuan 4. Indexers choose the tokens that a token sees: all of sequences of up to
    `index_topk` tokens, which are the longest ones here. Layers behind the last one are not
    used. The text model of the multimodal one rotates pairs of neighbours, and its norms of latents
    have the `rms_norm_eps` of the other norms."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise NotNative(key)
    kinds = set(config.get("layer_types") or [_KIND])
    if kinds != {_KIND}:
        found = ", ".join(sorted(map(str, kinds)))
        raise UnsupportedModel(f"config.json: layer_types: expected {_KIND} alone, got {found}")
    is_multimodal = config.get("model_type") == "hy_v4_vl_text"
    config = with_values(with_keys(config, {}, **_SIZES), rope_interleave=is_multimodal)
    experts, dense = _experts(config), gated_mlp(config)
    streams = HyperConnectionsSpec(
        num_streams=_num_streams(config),
        magnitude=float(config.get("hc_magnitude", 2.0)),
        offset=float(config.get("hc_eps", 1e-6)),
        eps=config.get("rms_norm_eps", 1e-5),
    )
    settings = latent_decoder(
        config,
        [experts if is_sparse else dense for is_sparse in have_experts(config, 1)],
        eps=1e-5,
        expert_names=EXPERT_NAMES | STACK_NAMES,
        max_model_len=min(config.get("index_topk", 2048), config["max_position_embeddings"]),
        unused_names=r".*\.self_attn\.indexer\..*|model\.mtp_layers\..*",
    )
    attention = latent_attention(config, 1536)
    attention = replace(
        attention,
        eps=streams.eps if is_multimodal else attention.eps,
        has_sinks=True,
        gates=OutputGates.OF_ELEMENTS,
    )
    layers = tuple(
        replace(
            layer, attention=attention, hyper_connections=streams, names={**layer.names, **_NAMES}
        )
        for layer in settings.layers
    )
    return replace(settings, layers=layers, hyper_connections=streams)


def _experts(config: Config) -> ExpertsSpec:
    limit = config.get("swiglu_limit", 10.0)
    if not limit or limit < 0:
        raise UnsupportedModel(f"config.json: swiglu_limit: expected one above 0, got {limit}")
    experts = scored_experts(
        config, num_experts=256, num_groups=1, num_chosen_groups=1, scale=2.827
    )
    return replace(experts, gate=Gate(limit=float(limit)), storage=ExpertStorage.STACK)


def _num_streams(config: Config) -> int:
    num_streams, limit = config.get("hc_mult", 4), 16
    if not 1 <= num_streams <= limit:
        raise UnsupportedModel(
            f"config.json: hc_mult: expected 1 to {limit} streams, got {num_streams}"
        )
    return int(num_streams)
