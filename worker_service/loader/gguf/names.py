"""Tensors of a GGUF file under the names of `transformers`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker_service.errors import BadCheckpoint
from worker_service.loader.gguf.architectures import ENCODERS, LATENT
from worker_service.loader.gguf.config import gguf_config
from worker_service.loader.gguf.encoders import DENSE_LAYERS, RERANKER
from worker_service.loader.gguf.file import (
    Gguf,
    GgufDifference,
    GgufNumber,
    GgufTensor,
    Order,
    open_gguf,
)
from worker_service.loader.gguf.gemma import GEMMA3N, GEMMA4
from worker_service.loader.gguf.metadata import ROPE_FREQUENCIES
from worker_service.loader.gguf.rope import LONG_ROPE, LONG_ROPES, SECTIONS
from worker_service.loader.tensors import OpenFiles

_PAIRS_ROTATED = (
    *("llama", "granite", "granitemoe", "granitehybrid", "mistral3", "nemotron_h"),
    *("nemotron_h_moe", "smollm3", "arcee", "olmo", "minicpm", "internlm2"),
)
"""Architectures with RoPE of neighbouring elements in files, and of halves in `transformers`, so
that the rows of queries and keys are permuted, as are those of models without RoPE that share their
converter. RoPE of the others is the same in both."""

_GROUPS_JOINED = ("bloom", "falcon", "gptneox")
"""Architectures with queries, keys and values of all heads one after the other, see `_groups`."""

_HEADS_INTERLEAVED = ("qwen35", "qwen35moe")
"""Architectures with heads of values in another order, see `_interleaved`."""

_NORMS_ADD_ONE = ("gemma", "qwen3_next", "qwen3_5", "nemotron.")
"""Models with norms by weights plus 1, which files store, by `model_type` as in `names.txt`."""

_FALCON_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
"""Names of the norms of a layer of Falcon, if it has two."""

_TENSOR = re.compile(
    r"(?:blk\.(\d+)\.)?(\w+|\w+\.scale|(?:cls|shortconv|indexer)\.\w+)(?:\.(weight|bias))?"
)
_SUFFIX = re.compile(r"\.(weight|bias)$")
_WITHOUT_SUFFIX = (
    *("sinks", "sink_bias", "e_score_correction_bias", ".expert_bias"),
    *(".dt_bias", ".A_log", ".D"),
    *(".layer_scalar", ".router.scale", ".per_expert_scale", ".correct_output_scale"),
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

_JOINED = "attn_qkv"
"""The name in files of queries, keys and values in one tensor."""

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
    if config.get("num_ln_in_parallel_attn") == 2:
        names |= _FALCON_NORMS
    read_already = [*(LONG_ROPE.values() if architecture in LONG_ROPES else (ROPE_FREQUENCIES,))]
    if "pooling_type" in config:
        read_already += [f"{name}.weight" for name in DENSE_LAYERS]
    tensors = {
        part.name: replace(
            part,
            files=files,
            **orders.get(_SUFFIX.sub("", part.name).rpartition(".")[2], Orders())._asdict(),
            has_one_added=_has_one_added(kind, part.name),
            is_exponential=part.name.endswith(".A_log"),
        )
        for tensor in gguf.tensors.values()
        if tensor.stored_name not in read_already and not tensor.stored_name.startswith(unused)
        for separate in _separated(tensor, names, config)
        for part in _parts(separate)
    }
    if config.get(RERANKER):
        tensors["score.weight"] = _difference(tensors["score.weight"])
    return tensors | (_xielus(gguf, num_layers) if kind == "apertus" else {})


def _difference(tensor: GgufTensor) -> GgufDifference:
    """The first row of a tensor of two, less the second."""
    fields = {field.name: getattr(tensor, field.name) for field in dataclass_fields(tensor)}
    return GgufDifference(**fields | {"shape": [1, tensor.shape[1]], "both": tensor})


def _xielus(gguf: Gguf, num_layers: int) -> dict[str, GgufTensor]:
    """The numbers of the activations of Apertus, which are metadata of a file."""
    numbers: dict[str, GgufTensor] = {}
    for key in ("alpha_p", "alpha_n", "beta", "eps"):
        setting, shape = f"xielu.{key}", [1] if key.startswith("alpha") else []
        values = gguf.metadata.get(setting)
        values = values if isinstance(values, list) else [values] * num_layers
        if len(values) != num_layers or not all(isinstance(value, float) for value in values):
            expected = f"a number for each of {num_layers} layers"
            raise BadCheckpoint(f"{gguf.files[0]}: {setting}: expected {expected}, got {values}")
        for layer, value in enumerate(values):
            name = f"model.layers.{layer}.mlp.act_fn.{key}"
            numbers[name] = GgufNumber(
                name=name,
                stored_name=setting,
                file=gguf.files[0],
                files=OpenFiles(),
                shape=shape,
                type="F32",
                offset=0,
                num_bytes=0,
                value=value,
            )
    return numbers


def _has_one_added(kind: str, name: str) -> bool:
    """Whether a tensor is that of a norm whose weights begin at 0 in `transformers`."""
    of_gate = name.endswith(".linear_attn.norm.weight")
    begins_at_zero = f"{kind}.".startswith(_NORMS_ADD_ONE) and kind not in (GEMMA3N, GEMMA4)
    return begins_at_zero and name.endswith("norm.weight") and not of_gate


class Orders(NamedTuple):
    """Those of a tensor that has another order in files than in `transformers`."""

    rows: Order | None = None
    columns: Order | None = None


def orders_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Orders]:
    """The orders of tensors by the last part of their module's name, or of their own."""
    num_heads = config.get("num_attention_heads", 0)
    counts = {"q_proj": num_heads, "k_proj": config.get("num_key_value_heads") or num_heads}
    if architecture in _PAIRS_ROTATED:
        return {name: Orders(partial(_pairs, count)) for name, count in counts.items()}
    rope = config.get("rope_parameters") or {}
    if architecture == "glm4" and rope.get(SECTIONS):
        rotary_dim = round(config["head_dim"] * rope["partial_rotary_factor"])
        return {
            name: Orders(partial(_neighbours, count, rotary_dim)) for name, count in counts.items()
        }
    if architecture in _GROUPS_JOINED:
        return {"query_key_value": Orders(partial(_groups, *counts.values()))}
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


def _neighbours(num_heads: int, rotary_dim: int, num_rows: int) -> Tensor:
    """Of heads whose first elements, which are rotated, have pairs of halves in files, and of
    neighbours in `transformers`."""
    rows = torch.arange(num_rows).reshape(num_heads, -1)
    rotated = rows[:, :rotary_dim].reshape(num_heads, 2, -1).swapaxes(1, 2).flatten(1)
    return torch.cat([rotated, rows[:, rotary_dim:]], 1).flatten()


def _groups(num_heads: int, num_kv_heads: int, num_rows: int) -> Tensor:
    """Of queries, keys and values, which follow each other by head of keys in `transformers`."""
    heads = torch.arange(num_rows).reshape(num_heads + 2 * num_kv_heads, -1)
    parts = heads.split([num_heads, num_kv_heads, num_kv_heads])
    return torch.cat([part.reshape(num_kv_heads, -1) for part in parts], 1).flatten()


def _interleaved(num_key_heads: int, num_heads: int, first: int, num_rows: int) -> Tensor:
    """Of heads of values from row `first` on, which follow each other by head of keys in
    `transformers`; files begin with the first of each head of keys, to repeat keys as a block."""
    rows = torch.arange(first, num_rows).reshape(num_heads // num_key_heads, num_key_heads, -1)
    return torch.cat([torch.arange(first), rows.swapaxes(0, 1).flatten()])


def names_of(model_type: str) -> dict[str, str]:
    """Names in `transformers` by names in files, of tensors of a kind of model."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split() for line in lines if not line.startswith("#"))
    named = {"encoder": ENCODERS, "latent": LATENT}
    groups = ["all", *(group for group, models in named.items() if model_type in models)]
    return {
        stored: name
        for kinds, stored, name in rows
        if kinds in groups or f"{model_type}.".startswith(tuple(kinds.split(",")))
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


def _separated(
    tensor: GgufTensor, names: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[GgufTensor]:
    """The tensor under its name, or the queries, keys and values that one of a model with three
    such tensors contains one after the other, as llama.cpp reads them of most architectures."""
    stored = tensor.stored_name
    if f".{_JOINED}." not in stored or _JOINED in names or "attn_q" not in names:
        yield replace(tensor, name=name_of(stored, names))
        return
    num_heads, head_dim = config["num_attention_heads"], config["head_dim"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    value_dim = config.get("v_head_dim") or head_dim
    sizes = {
        "attn_q": num_heads * head_dim,
        "attn_k": num_kv_heads * head_dim,
        "attn_v": num_kv_heads * value_dim,
    }
    num_rows, first = tensor.shape[0], 0
    if num_rows != (expected := sum(sizes.values())):
        raise BadCheckpoint(
            f"{tensor.file}: {stored}: expected {expected} rows of queries, keys and values, got"
            f" {num_rows}"
        )
    num_bytes = tensor.num_bytes // num_rows
    for part, count in sizes.items():
        yield replace(
            tensor,
            name=name_of(stored.replace(_JOINED, part), names),
            shape=[count, *tensor.shape[1:]],
            offset=tensor.offset + first * num_bytes,
            num_bytes=count * num_bytes,
        )
        first += count


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
