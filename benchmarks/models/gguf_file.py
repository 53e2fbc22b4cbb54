"""The weights of a checkpoint, or of a LoRA adapter, as a GGUF file for llama.cpp.

llama.cpp's own converter supports only known tokenizers, to which a synthetic one does not belong;
so the file is written here, with the `gguf` library of llama.cpp's authors.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.models.model_shapes import Shape
from benchmarks.models.synthetic_tokenizer import (
    BOS_TOKEN_ID,
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    FIRST_WORD_ID,
    SPECIAL,
    words,
)

_DEFAULTS = {"rope_theta": 10_000.0}
"""The defaults of `transformers` for values that a shape does not set."""

_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "granitemoehybrid": "granitehybrid"}
"""llama.cpp's names of model types, where they differ."""

_EXPERT = re.compile(r"(.+\.experts)\.\d+(\..+)")
_PARTS = re.compile(r"(.+\.)shared_mlp\.input_linear(\.weight)")
"""The gate and the up projection of an MLP in one tensor."""


def write_gguf(shape: Shape, checkpoint: Path, path: Path) -> None:
    """Write the weights in the folder `checkpoint` to the file `path`, in their own dtype."""
    import gguf

    writer = gguf.GGUFWriter(path, _architecture(shape))
    _add_shape(writer, shape)
    _add_vocabulary(writer, shape.vocab_size)
    for name, tensor in _apart(_stacked(_tensors(checkpoint), shape.num_experts)):
        _add_tensor(writer, _name_of(name, shape), _interleaved(name, _stored(name, tensor), shape))
    _write(writer)


def write_gguf_adapter(shape: Shape, folder: Path, path: Path) -> None:
    """Write the LoRA adapter in a folder of PEFT to the file `path`, in its own dtype."""
    import gguf

    settings = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, _architecture(shape))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    for name, tensor in _tensors(folder):
        module, matrix = name.removeprefix("base_model.model.").split(".lora_")
        weight, part = f"{module}.weight", matrix[0].lower()
        if part == "b":
            tensor = _interleaved(weight, tensor, shape)
        _add_tensor(writer, f"{_name_of(weight, shape)}.lora_{part}", tensor)
    _write(writer)


def _architecture(shape: Shape) -> str:
    """llama.cpp's name of a shape's architecture."""
    return _ARCHITECTURES.get(shape.model_type, shape.model_type)


def _name_of(name: str, shape: Shape) -> str:
    """llama.cpp's name of a tensor."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[_architecture(shape)], shape.num_layers)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    name = name.replace(".shared_mlp.output_linear.", ".mlp.down_proj.")
    target: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert target is not None, f"llama.cpp has no tensor {name}"
    return target


def _write(writer) -> None:  # type: ignore[no-untyped-def]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    extra = _DEFAULTS | shape.extra
    has_kv = [kind.endswith("attention") for kind in extra.get("layer_types", ())]
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv([shape.num_kv_heads * has for has in has_kv] or shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(extra["rope_theta"])
    writer.add_layer_norm_rms_eps(extra.get("rms_norm_eps", extra.get("norm_eps", 1e-6)))
    writer.add_vocab_size(shape.vocab_size)
    if shape.num_experts > 1:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.intermediate_size)
    if shape.model_type == "lfm2":
        writer.add_shortconv_l_cache(extra["conv_L_cache"])
    if shape.model_type == "granitemoehybrid":
        _add_granite(writer, extra)


def _add_granite(writer, extra: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """Add the sizes of Mamba-2, and that layers have no positions and no multipliers."""
    writer.add_ssm_conv_kernel(extra["mamba_d_conv"])
    writer.add_ssm_state_size(extra["mamba_d_state"])
    writer.add_ssm_group_count(extra["mamba_n_groups"])
    writer.add_ssm_inner_size(extra["mamba_n_heads"] * extra["mamba_d_head"])
    writer.add_ssm_time_step_rank(extra["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(False)
    for add in (
        writer.add_attention_scale,
        writer.add_embedding_scale,
        writer.add_residual_scale,
        writer.add_logit_scale,
    ):
        add(1.0)


def _add_vocabulary(writer, vocab_size: int) -> None:  # type: ignore[no-untyped-def]
    """Add the checkpoint's tokenizer in the form of a SentencePiece vocabulary, with the same ids
    and texts."""
    import gguf

    some_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    others = [f"▁{word}" for word in words(vocab_size - FIRST_WORD_ID)]
    kinds = gguf.TokenType
    types = (
        [kinds.UNKNOWN] + [kinds.CONTROL] * 2 + [kinds.BYTE] * 256 + [kinds.NORMAL] * len(others)
    )
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*SPECIAL, *some_bytes, *others])
    writer.add_token_scores([-float(rank) for rank in range(vocab_size)])
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(writer, name: str, tensor: Tensor) -> None:  # type: ignore[no-untyped-def]
    import gguf

    if tensor.dim() == 1 or tensor.dtype == torch.float32:  # llama.cpp expects float32 vectors
        writer.add_tensor(name, tensor.float().numpy())
        return
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    data = tensor.view(torch.uint8).numpy()  # numpy has no bfloat16
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _stacked(tensors: Iterable[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, Tensor]]:
    """Join the tensors of this number of experts."""
    stacks: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if (match := _EXPERT.fullmatch(name)) is None:
            yield name, tensor
            continue
        joined = "".join(match.groups())
        stack = stacks.setdefault(joined, {})
        stack[name] = tensor
        if len(stack) == count:
            names = sorted(stack, key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
            yield joined, torch.stack([stack[name] for name in names])
            del stacks[joined]


def _apart(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Part gate and up projections."""
    for name, tensor in tensors:
        if (match := _PARTS.fullmatch(name)) is None:
            yield name, tensor
            continue
        for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{match[1]}mlp.{part}_proj{match[2]}", rows


def _stored(name: str, tensor: Tensor) -> Tensor:
    """A tensor as llama.cpp has it: what is no matrix of a product in float32."""
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return tensor[:, 0].float()
    if name.endswith(".A_log"):
        return -tensor.float().exp()[:, None]
    if name.endswith((".mamba.D", ".mamba.norm.weight")):
        return tensor.float().view((-1, 1) if name.endswith("D") else (1, -1))
    return tensor.float() if name.endswith(".mlp.gate.weight") else tensor


def _interleaved(name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """Permute the rows of query and key projections: llama.cpp applies RoPE to adjacent elements of
    a head of Llama, `transformers` to elements half a head apart."""
    if shape.model_type != "llama":
        return tensor
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.view(heads, 2, shape.head_dim // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                yield name, file.get_tensor(name)
