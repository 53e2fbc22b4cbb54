"""Tensors of a GGUF file under the names of `transformers`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker_service.errors import BadCheckpoint
from worker_service.loader.gguf_file import GgufTensor, Order, open_gguf
from worker_service.loader.gguf_gemma4 import GEMMA4
from worker_service.loader.gguf_metadata import ROPE_FREQUENCIES
from worker_service.loader.gguf_model import ENCODERS, LONG_ROPE, gguf_config
from worker_service.loader.tensors import OpenFiles

_PAIRS_ROTATED = (
    *("llama", "granite", "granitemoe", "granitehybrid", "mistral3", "nemotron_h"),
    *("nemotron_h_moe", "smollm3"),
)
"""Architectures with RoPE of neighbouring elements in files, and of halves in `transformers`, so
that the rows of queries and keys are permuted, as are those of models without RoPE that share their
converter. RoPE of the others is the same in both."""

_HEADS_INTERLEAVED = ("qwen35", "qwen35moe")
"""Architectures with heads of values in another order, see `_interleaved`."""

_NORMS_ADD_ONE = ("gemma", "qwen3_next", "qwen3_5")
"""Beginnings of `model_type` with norms by weights plus 1, which files store."""

_TENSORS = """
all                             token_embd            model.embed_tokens
all                             output_norm           model.norm
all                             output                lm_head
all                             attn_norm             input_layernorm
all                             attn_q                self_attn.q_proj
all                             attn_k                self_attn.k_proj
all                             attn_v                self_attn.v_proj
all                             attn_output           self_attn.o_proj
all                             attn_q_norm           self_attn.q_norm
all                             attn_k_norm           self_attn.k_norm
all                             post_attention_norm   post_attention_layernorm
all                             post_ffw_norm         post_feedforward_layernorm
all                             ffn_norm              post_attention_layernorm
all                             ffn_gate              mlp.gate_proj
all                             ffn_up                mlp.up_proj
all                             ffn_down              mlp.down_proj
all                             ffn_gate_inp          mlp.gate
all                             ffn_gate_exps         mlp.experts.*.gate_proj
all                             ffn_up_exps           mlp.experts.*.up_proj
all                             ffn_down_exps         mlp.experts.*.down_proj
all                             ffn_gate_shexp        mlp.shared_experts.gate_proj
all                             ffn_up_shexp          mlp.shared_experts.up_proj
all                             ffn_down_shexp        mlp.shared_experts.down_proj
gemma                           ffn_norm              pre_feedforward_layernorm
phi3                            attn_qkv              self_attn.qkv_proj
phi3,glm4                       ffn_up                mlp.gate_up_proj
glm4                            post_attention_norm   post_self_attn_layernorm
glm4                            post_ffw_norm         post_mlp_layernorm
glm4_moe                        post_attention_norm   post_attention_layernorm
glm4_moe                        ffn_up                mlp.up_proj
glm4_moe                        exp_probs_b           mlp.gate.e_score_correction_bias
ernie4_5_moe                    exp_probs_b           mlp.moe_statics.e_score_correction_bias
minimax                         exp_probs_b           block_sparse_moe.e_score_correction_bias
mixtral,minimax,granite,phimoe  ffn_gate_inp          block_sparse_moe.gate
mixtral,minimax,granite,phimoe  ffn_gate_exps         block_sparse_moe.experts.*.w1
mixtral,minimax,granite,phimoe  ffn_up_exps           block_sparse_moe.experts.*.w3
mixtral,minimax,granite,phimoe  ffn_down_exps         block_sparse_moe.experts.*.w2
qwen                            ffn_gate_inp_shexp    mlp.shared_expert_gate
qwen                            ffn_gate_shexp        mlp.shared_expert.gate_proj
qwen                            ffn_up_shexp          mlp.shared_expert.up_proj
qwen                            ffn_down_shexp        mlp.shared_expert.down_proj
deepseek,youtu,kimi,mistral4    attn_q_a              self_attn.q_a_proj
deepseek,youtu,kimi,mistral4    attn_q_a_norm         self_attn.q_a_layernorm
deepseek,youtu,kimi,mistral4    attn_q_b              self_attn.q_b_proj
deepseek,youtu,kimi,mistral4    attn_kv_a_mqa         self_attn.kv_a_proj_with_mqa
deepseek,youtu,kimi,mistral4    attn_kv_a_norm        self_attn.kv_a_layernorm
deepseek,youtu,kimi,mistral4    attn_kv_b             self_attn.kv_b_proj
deepseek,youtu,kimi,mistral4    attn_k_b              self_attn.k_b_proj
deepseek,youtu,kimi,mistral4    attn_v_b              self_attn.v_b_proj
deepseek                        exp_probs_b           mlp.gate.e_score_correction_bias
hunyuan                         attn_q_norm           self_attn.query_layernorm
hunyuan                         attn_k_norm           self_attn.key_layernorm
hunyuan                         ffn_gate_inp          mlp.gate.wg
hunyuan                         ffn_gate_shexp        mlp.shared_mlp.gate_proj
hunyuan                         ffn_up_shexp          mlp.shared_mlp.up_proj
hunyuan                         ffn_down_shexp        mlp.shared_mlp.down_proj
granitemoehybrid                ffn_gate              shared_mlp.gate_proj
granitemoehybrid                ffn_up                shared_mlp.up_proj
granitemoehybrid                ffn_down              shared_mlp.down_proj
granitemoehybrid                ffn_gate_shexp        shared_mlp.gate_proj
granitemoehybrid                ffn_up_shexp          shared_mlp.up_proj
granitemoehybrid                ffn_down_shexp        shared_mlp.down_proj
granitemoeh,falcon_h1,jamba     ssm_in                mamba.in_proj
granitemoeh,falcon_h1,jamba     ssm_conv1d            mamba.conv1d
granitemoeh,falcon_h1,jamba     ssm_dt                mamba.dt_bias
granitemoeh,falcon_h1,jamba     ssm_a                 mamba.A_log
granitemoeh,falcon_h1,jamba     ssm_d                 mamba.D
granitemoeh,falcon_h1,jamba     ssm_norm              mamba.norm
granitemoeh,falcon_h1,jamba     ssm_out               mamba.out_proj
falcon_h1,jamba                 ffn_norm              pre_ff_layernorm
falcon_h1,jamba                 ffn_gate              feed_forward.gate_proj
falcon_h1,jamba                 ffn_up                feed_forward.up_proj
falcon_h1,jamba                 ffn_down              feed_forward.down_proj
jamba                           ssm_x                 mamba.x_proj
jamba                           ssm_dt                mamba.dt_proj
jamba                           ssm_dt_norm           mamba.dt_layernorm
jamba                           ssm_b_norm            mamba.b_layernorm
jamba                           ssm_c_norm            mamba.c_layernorm
jamba                           ffn_gate_inp          feed_forward.router
jamba                           ffn_gate_exps         feed_forward.experts.*.gate_proj
jamba                           ffn_up_exps           feed_forward.experts.*.up_proj
jamba                           ffn_down_exps         feed_forward.experts.*.down_proj
mamba,falcon_mamba,nemotron     attn_norm             norm
mamba,falcon_mamba,nemotron     ssm_in                mixer.in_proj
mamba,falcon_mamba,nemotron     ssm_conv1d            mixer.conv1d
mamba,falcon_mamba,nemotron     ssm_x                 mixer.x_proj
mamba,falcon_mamba              ssm_dt                mixer.dt_proj
mamba2,nemotron                 ssm_dt                mixer.dt_bias
mamba,falcon_mamba,nemotron     ssm_a                 mixer.A_log
mamba,falcon_mamba,nemotron     ssm_d                 mixer.D
mamba,falcon_mamba,nemotron     ssm_norm              mixer.norm
mamba,falcon_mamba,nemotron     ssm_out               mixer.out_proj
nemotron                        attn_q                mixer.q_proj
nemotron                        attn_k                mixer.k_proj
nemotron                        attn_v                mixer.v_proj
nemotron                        attn_output           mixer.o_proj
nemotron                        ffn_up                mixer.up_proj
nemotron                        ffn_down              mixer.down_proj
nemotron                        exp_probs_b           mixer.gate.e_score_correction_bias
nemotron                        ffn_gate_inp          mixer.gate
nemotron                        ffn_up_exps           mixer.experts.*.up_proj
nemotron                        ffn_down_exps         mixer.experts.*.down_proj
nemotron                        ffn_up_shexp          mixer.shared_experts.up_proj
nemotron                        ffn_down_shexp        mixer.shared_experts.down_proj
nemotron                        ffn_latent_down       mixer.fc1_latent_proj
nemotron                        ffn_latent_up         mixer.fc2_latent_proj
lfm2                            token_embd_norm       model.embedding_norm
lfm2                            attn_norm             operator_norm
lfm2                            attn_q_norm           self_attn.q_layernorm
lfm2                            attn_k_norm           self_attn.k_layernorm
lfm2                            attn_output           self_attn.out_proj
lfm2                            shortconv.conv        conv.conv
lfm2                            shortconv.in_proj     conv.in_proj
lfm2                            shortconv.out_proj    conv.out_proj
lfm2                            ffn_norm              ffn_norm
lfm2                            ffn_gate              feed_forward.w1
lfm2                            ffn_up                feed_forward.w3
lfm2                            ffn_down              feed_forward.w2
lfm2                            ffn_gate_inp          feed_forward.gate
lfm2                            ffn_gate_exps         feed_forward.experts.*.w1
lfm2                            ffn_up_exps           feed_forward.experts.*.w3
lfm2                            ffn_down_exps         feed_forward.experts.*.w2
lfm2                            exp_probs_b           feed_forward.expert_bias
gemma4                          ffn_gate_inp          router.proj
gemma4                          ffn_gate_inp.scale    router.scale
gemma4                          ffn_gate_up_exps      experts.*.gate_up_proj
gemma4                          ffn_gate_exps         experts.*.gate_proj
gemma4                          ffn_up_exps           experts.*.up_proj
gemma4                          ffn_down_exps         experts.*.down_proj
gemma4                          ffn_down_exps.scale   router.per_expert_scale
gemma4                          pre_ffw_norm_2        pre_feedforward_layernorm_2
gemma4                          post_ffw_norm_1       post_feedforward_layernorm_1
gemma4                          post_ffw_norm_2       post_feedforward_layernorm_2
gemma4                          layer_output_scale    layer_scalar
gemma4                          inp_gate              per_layer_input_gate
gemma4                          proj                  per_layer_projection
gemma4                          post_norm             post_per_layer_input_norm
gemma4                          per_layer_token_embd  model.embed_tokens_per_layer
gemma4                          per_layer_model_proj  model.per_layer_model_projection
gemma4                          per_layer_proj_norm   model.per_layer_projection_norm
llama4                          ffn_gate_inp          feed_forward.router
llama4                          ffn_gate_exps         feed_forward.experts.*.gate_proj
llama4                          ffn_up_exps           feed_forward.experts.*.up_proj
llama4                          ffn_down_exps         feed_forward.experts.*.down_proj
llama4                          ffn_gate_shexp        feed_forward.shared_expert.gate_proj
llama4                          ffn_up_shexp          feed_forward.shared_expert.up_proj
llama4                          ffn_down_shexp        feed_forward.shared_expert.down_proj
llama4                          ffn_gate              feed_forward.gate_proj
llama4                          ffn_up                feed_forward.up_proj
llama4                          ffn_down              feed_forward.down_proj
mistral4                        ffn_gate_up_exps      mlp.experts.*.gate_up_proj
gpt_oss                         attn_sinks            self_attn.sinks
gpt_oss                         ffn_gate_inp          mlp.router
qwen3_next,qwen3_5              attn_qkv              linear_attn.in_proj_qkv
qwen3_next,qwen3_5              attn_gate             linear_attn.in_proj_z
qwen3_next,qwen3_5              ssm_in                linear_attn.in_proj_qkvz
qwen3_next,qwen3_5              ssm_ba                linear_attn.in_proj_ba
qwen3_next,qwen3_5              ssm_beta              linear_attn.in_proj_b
qwen3_next,qwen3_5              ssm_alpha             linear_attn.in_proj_a
qwen3_next,qwen3_5              ssm_conv1d            linear_attn.conv1d
qwen3_next,qwen3_5              ssm_dt                linear_attn.dt_bias
qwen3_next,qwen3_5              ssm_a                 linear_attn.A_log
qwen3_next,qwen3_5              ssm_norm              linear_attn.norm
qwen3_next,qwen3_5              ssm_out               linear_attn.out_proj
kimi                            exp_probs_b           block_sparse_moe.gate.e_score_correction_bias
kimi                            ffn_gate_inp          block_sparse_moe.gate
kimi                            ffn_gate_exps         block_sparse_moe.experts.*.w1
kimi                            ffn_up_exps           block_sparse_moe.experts.*.w3
kimi                            ffn_down_exps         block_sparse_moe.experts.*.w2
kimi                            ffn_gate_shexp        block_sparse_moe.shared_experts.gate_proj
kimi                            ffn_up_shexp          block_sparse_moe.shared_experts.up_proj
kimi                            ffn_down_shexp        block_sparse_moe.shared_experts.down_proj
kimi                            ssm_conv1d_q          self_attn.q_conv1d
kimi                            ssm_conv1d_k          self_attn.k_conv1d
kimi                            ssm_conv1d_v          self_attn.v_conv1d
kimi                            ssm_f_a               self_attn.f_a_proj
kimi                            ssm_f_b               self_attn.f_b_proj
kimi                            ssm_beta              self_attn.b_proj
kimi                            ssm_g_a               self_attn.g_a_proj
kimi                            ssm_g_b               self_attn.g_b_proj
kimi                            ssm_dt                self_attn.dt_bias
kimi                            ssm_a                 self_attn.A_log
kimi                            ssm_norm              self_attn.o_norm
encoder                         token_embd            embeddings.word_embeddings
encoder                         token_embd_norm       embeddings.LayerNorm
encoder                         token_types           embeddings.token_type_embeddings
encoder                         position_embd         embeddings.position_embeddings
encoder                         output_norm           final_norm
encoder                         attn_q                attention.self.query
encoder                         attn_k                attention.self.key
encoder                         attn_v                attention.self.value
encoder                         attn_qkv              attn.Wqkv
encoder                         attn_output           attention.output.dense
encoder                         attn_output_norm      attention.output.LayerNorm
encoder                         ffn_up                intermediate.dense
encoder                         ffn_gate              mlp.fc12
encoder                         ffn_down              output.dense
encoder                         layer_output_norm     output.LayerNorm
bert                            cls                   classifier.dense
bert                            cls.output            classifier.out_proj
modern                          attn_norm             attention.output.LayerNorm
modern                          ffn_norm              output.LayerNorm
modern                          ffn_up                mlp.Wi
modern                          cls                   head.dense
modern                          cls.norm              head.norm
modern                          cls.output            classifier
"""
"""Beginnings of `model_type`, a tensor's name in GGUF files, and its name in `transformers`, of
which later rows take precedence. `*` stands for an expert's index."""

_TENSOR = re.compile(
    r"(?:blk\.(\d+)\.)?(\w+|\w+\.scale|cls\.\w+|shortconv\.\w+)(?:\.(weight|bias))?"
)
_SUFFIX = re.compile(r"\.(weight|bias)$")
_WITHOUT_SUFFIX = (
    *("sinks", "e_score_correction_bias", ".expert_bias"),
    *(".dt_bias", ".A_log", ".D"),
    *(".layer_scalar", ".router.scale", ".per_expert_scale"),
)
"""Ends of names that have no `.weight` or `.bias` in `transformers`."""

_STORED_AS_COLUMNS = (".A_log", ".D")
"""Ends of names of vectors in `transformers`, which may be matrices of one column in files."""

_STORED_AS_GROUPS = (".mamba.norm.weight", ".mixer.norm.weight")
"""Ends of names of vectors in `transformers`, which are matrices in files, of a row for each
group."""

_CONVOLUTIONS = ("conv1d.weight", ".conv.conv.weight")
"""Ends of names of weights of convolutions, [channels, 1, width], whose axes of one element files
leave out, or have elsewhere."""

_HEADS_AMONG_AXES = ".self_attn.A_log"
"""End of names of tensors [1, 1, heads, 1] in `transformers`, with other axes in files."""

_STORED_AS_VECTORS = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")
"""Ends of names of matrices of one row in `transformers`."""


def gguf_tensors(path: Path, files: OpenFiles) -> dict[str, GgufTensor]:
    """The tensors of a model under the names of `transformers`. files: counts what is read. Raises
    BadCheckpoint or UnsupportedModel."""
    gguf = open_gguf(path)
    config = gguf_config(path)
    kind = config["model_type"]
    architecture, num_layers = gguf.metadata["general.architecture"], config["num_hidden_layers"]
    num_further = gguf.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    # Of layers that predict further tokens.
    unused = tuple(f"blk.{num_layers + layer}." for layer in range(num_further))
    orders, names = orders_of(architecture, config), names_of(kind)
    read_already = LONG_ROPE.values() if kind in ("phi3", "phimoe") else (ROPE_FREQUENCIES,)
    return {
        part.name: replace(
            part,
            files=files,
            **orders.get(_SUFFIX.sub("", part.name).rpartition(".")[2], Orders())._asdict(),
            has_one_added=_has_one_added(kind, part.name),
            is_exponential=part.name.endswith(".A_log"),
        )
        for tensor in gguf.tensors.values()
        if tensor.stored_name not in read_already and not tensor.stored_name.startswith(unused)
        for part in _parts(replace(tensor, name=name_of(tensor.stored_name, names)))
    }


def _has_one_added(kind: str, name: str) -> bool:
    """Whether a tensor is that of a norm whose weights begin at 0 in `transformers`."""
    of_gate = name.endswith(".linear_attn.norm.weight")
    begins_at_zero = kind.startswith(_NORMS_ADD_ONE) and kind != GEMMA4
    return begins_at_zero and name.endswith("norm.weight") and not of_gate


class Orders(NamedTuple):
    """Those of a tensor that has another order in files than in `transformers`."""

    rows: Order | None = None
    columns: Order | None = None


def orders_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Orders]:
    """The orders of tensors by the last part of their module's name, or of their own."""
    if architecture in _PAIRS_ROTATED:
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        counts = {"q_proj": num_heads, "k_proj": num_kv_heads}
        return {name: Orders(partial(_pairs, count)) for name, count in counts.items()}
    if architecture not in _HEADS_INTERLEAVED:
        return {}
    heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * heads[0] * config["linear_key_head_dim"]
    of_values = partial(_interleaved, *heads, 0)
    with_keys = Orders(partial(_interleaved, *heads, keys))
    names = "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"
    return {
        **dict.fromkeys(names, Orders(of_values)),
        **dict.fromkeys(("in_proj_qkv", "conv1d"), with_keys),
        "out_proj": Orders(columns=of_values),
    }


def _pairs(num_heads: int, num_rows: int) -> Tensor:
    """Of heads whose pairs of elements are neighbours in files, and halves in `transformers`."""
    return torch.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).flatten()


def _interleaved(num_key_heads: int, num_heads: int, first: int, num_rows: int) -> Tensor:
    """Of heads of values from row `first` on, which follow each other by head of keys in
    `transformers`; files begin with the first of each head of keys, to repeat keys as a block."""
    rows = torch.arange(first, num_rows).reshape(num_heads // num_key_heads, num_key_heads, -1)
    return torch.cat([torch.arange(first), rows.swapaxes(0, 1).flatten()])


def names_of(model_type: str) -> dict[str, str]:
    """Names in `transformers` by names in files, of tensors of a kind of model."""
    rows = map(str.split, _TENSORS.strip().splitlines())
    groups = ("all", *(["encoder"] if model_type in ENCODERS else []))
    return {
        stored: name
        for kinds, stored, name in rows
        if kinds in groups or model_type.startswith(tuple(kinds.split(",")))
    }


def name_of(stored_name: str, names: Mapping[str, str]) -> str:
    """The name in `transformers`; an unknown name is returned unchanged, and refused later."""
    match = _TENSOR.fullmatch(stored_name)
    if match is None or match[2] not in names:
        return stored_name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    name = f"{layer}{names[match[2]]}"
    if name.endswith(_WITHOUT_SUFFIX):
        return name
    if match[3] is None and not name.endswith("norm"):  # some of Falcon-H1 have no suffix in files
        return stored_name
    return f"{name}.{match[3] or 'weight'}"


def _parts(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The tensor, or the consecutive tensors of all experts that it contains."""
    name, shape = tensor.name, tensor.shape
    if name.endswith(_STORED_AS_VECTORS) and len(shape) == 1:
        yield replace(tensor, shape=[1, *shape])
    elif name.endswith(_HEADS_AMONG_AXES):
        yield replace(tensor, shape=[1, 1, prod(shape), 1])
    elif name.endswith(_STORED_AS_COLUMNS) and len(shape) == 2 and shape[1] == 1:
        yield replace(tensor, shape=shape[:1])
    elif name.endswith(_STORED_AS_GROUPS) and len(shape) == 2:
        yield replace(tensor, shape=[shape[0] * shape[1]])
    elif name.endswith(_CONVOLUTIONS):
        yield replace(tensor, shape=[prod(shape[:-1]), 1, shape[-1]])
    elif "*" not in name:
        yield tensor
    elif len(shape) != (num_dims := 2 if name.endswith(".bias") else 3):
        raise BadCheckpoint(
            f"{tensor.file}: {name}: expected {num_dims} dimensions, the first of experts, got"
            f" {shape}"
        )
    else:
        num_bytes = tensor.num_bytes // shape[0]
        for expert in range(shape[0]):
            part = replace(
                tensor,
                name=name.replace("*", str(expert)),
                shape=shape[1:],
                offset=tensor.offset + expert * num_bytes,
                num_bytes=num_bytes,
            )
            yield from _halves(part) if ".gate_up_proj." in name else [part]


def _halves(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The rows of gate, then those of up, of a tensor that has both."""
    (rows, columns), size = tensor.shape, tensor.num_bytes // 2
    if rows % 2:
        raise BadCheckpoint(
            f"{tensor.file}: {tensor.name}: expected as many rows of gate as of up, got {rows} rows"
        )
    for index, half in enumerate(("gate", "up")):
        yield replace(
            tensor,
            name=tensor.name.replace("gate_up", half),
            shape=[rows // 2, columns],
            offset=tensor.offset + index * size,
            num_bytes=size,
        )
