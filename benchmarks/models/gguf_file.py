"""The weights of a checkpoint, or of a LoRA adapter, as a GGUF file for llama.cpp.

llama.cpp's own converter supports only known tokenizers, to which a synthetic one does not belong;
so the file is written here, with the `gguf` library of llama.cpp's authors.
"""

import json
from collections.abc import Iterator
from pathlib import Path

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

_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
"""The defaults of `transformers` for values that a shape does not set."""


def write_gguf(shape: Shape, checkpoint: Path, path: Path) -> None:
    """Write the weights in the folder `checkpoint` to the file `path`, in their own dtype."""
    import gguf

    writer = gguf.GGUFWriter(path, shape.model_type)
    _add_shape(writer, shape)
    _add_vocabulary(writer, shape.vocab_size)
    for name, tensor in _tensors(checkpoint):
        _add_tensor(writer, _name_of(name, shape), _interleaved(name, tensor, shape))
    _write(writer)


def write_gguf_adapter(shape: Shape, folder: Path, path: Path) -> None:
    """Write the LoRA adapter in a folder of PEFT to the file `path`, in its own dtype."""
    import gguf

    settings = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, shape.model_type)
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


def _name_of(name: str, shape: Shape) -> str:
    """llama.cpp's name of a tensor."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[shape.model_type], shape.num_layers)
    target: str | None = names.get_name(name, try_suffixes=(".weight",))
    assert target is not None, f"llama.cpp has no tensor {name}"
    return target


def _write(writer) -> None:  # type: ignore[no-untyped-def]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    extra = _DEFAULTS | shape.extra
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(extra["rope_theta"])
    writer.add_layer_norm_rms_eps(extra["rms_norm_eps"])
    writer.add_vocab_size(shape.vocab_size)


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
