"""Names of a decoder's tensors in checkpoints."""

import re

from worker_service.models.decoder.specs import DecoderSettings

KV_SCALE_NAMES = r".*\.self_attn\.(?:\d\.)?(?:[kv]_proj\.)?[kv]_scale"
"""Canonical names of the scales of keys and values in an fp8 cache, one number each."""

_NAMES = """
embed_tokens     wte word_embeddings embed_in embeddings
embed_positions  wpe
embedding_norm   word_embeddings_layernorm
layers           h blocks
norm             ln_f final_layer_norm norm_f final_layernorm final_norm
project_in
project_out
embed_tokens_per_layer
per_layer_model_projection
per_layer_projection_norm
altup_projections
altup_unembed_projections
hc_head
"""
"""Names of the modules of a model, which are the canonical ones after `model.`, and of the same
modules in other families."""

_CANONICAL = {
    name: names[0] for names in map(str.split, _NAMES.strip().splitlines()) for name in names
}
_DENSE_MLP = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
"""The module of an MLP in place of experts, as transformers writes Kimi Linear."""

_RENAMED = (
    (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
    (".hc_pre.hc_", ".hc_"),
    (".hc_attn_layer.hc_", ".attn_hc."),
    (".hc_mlp_layer.hc_", ".ffn_hc."),
    (".hc_head.hc_head_", ".hc_head.hc_"),
    (".learnable_sink_param", ".sinks"),
    (".linear_gate.", ".gate_proj."),
    (".q_gate_proj.", ".q_b_proj."),
    ("_layernorm.W_down.", "_layernorm.mlp.fc1."),
    ("_layernorm.W_up.", "_layernorm.mlp.fc2."),
)
"""Names of OLMo Hybrid's norms, which transformers also writes in place of others, Hunyuan 4's, and
A.X-K2's."""

_MODULE = re.compile(r"(?:(?:model|transformer|gpt_neox|backbone)\.)?(?:decoder\.)?(\w+)(\..+)")


def canonical_name(name: str) -> str:
    """Llama's name, whether or not the checkpoint has an LM head, whose names have a prefix."""
    name = _DENSE_MLP.sub(".mlp.", name)
    for stored, usual in _RENAMED:
        name = name.replace(stored, usual)
    match = _MODULE.fullmatch(name)
    if match is not None and match[1] == "embed_out":
        return f"lm_head{match[2]}"
    if match is None or match[1] not in _CANONICAL:
        return name
    return f"model.{_CANONICAL[match[1]]}{match[2]}"


def unused_names(settings: DecoderSettings) -> re.Pattern[str]:
    """See `LoadableModule.unused_names`."""
    unused = [r"mtp\..*", *([settings.unused_names] if settings.unused_names else [])]
    shared = "|".join(str(i) for i, source in enumerate(settings.sources) if source is not None)
    if shared:  # checkpoints may hold what transformers would not use
        unused.append(rf"model\.layers\.(?:{shared})\.self_attn\.[kv]_(?:proj|norm)\..*")
    if settings.ignores_further_layers:
        ours = "|".join(map(str, range(settings.num_layers)))
        unused.append(rf"model\.layers\.(?!(?:{ours})\.)\d+\..*")
    return re.compile("|".join(unused))
