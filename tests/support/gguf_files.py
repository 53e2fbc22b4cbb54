"""GGUF files made from tiny checkpoints, beside checkpoints with the same dequantized weights."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, make_checkpoint

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Offsets of the float16 numbers in blocks of types that the library only dequantizes."""

_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MistralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
}


def make_gguf(
    family: str, kind: str, folder: Path, *, metadata: Any = lambda writer: None, parts: int = 0
) -> tuple[Path, Path]:
    """(a GGUF file with weights of type `kind`, a checkpoint with the same weights in float32)

    metadata: adds to the file's metadata. parts: tensors in each file, if there are to be several.
    """
    from transformers import AutoConfig

    heads = {"head_dim": 64} if family in ("llama", "qwen3") else {}
    source = make_checkpoint(family, folder / "source", **SHAPE, **heads)
    config = AutoConfig.from_pretrained(source)
    name, number = _ARCHITECTURES[config.architectures[0]]
    file = folder / f"{family}-{kind}.gguf"
    writer = gguf.GGUFWriter(file, name, split_max_tensors=parts)
    _add_config(writer, config)
    _add_tokenizer(writer)
    metadata(writer)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    dequantized = {}
    for tensor_name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        order = np.arange(len(values))
        if name == "llama" and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            query = ".q_proj." in tensor_name
            num_heads = config.num_attention_heads if query else config.num_key_value_heads
            order = order.reshape(num_heads, 2, -1).swapaxes(1, 2).ravel()
        data, result, data_type = _quantized(values[order], kind)
        stored_name = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None
        writer.add_tensor(stored_name, data, raw_dtype=data_type)
        dequantized[tensor_name] = torch.from_numpy(result[np.argsort(order)].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = Path(shutil.copytree(source, folder / "reference"))
    save_file(dequantized, reference / "model.safetensors", metadata={"format": "pt"})
    if parts:
        file = next(folder.glob("*-00001-of-*.gguf"))
    return file, reference


def _quantized(values: Any, kind: str) -> tuple[Any, Any, gguf.GGMLQuantizationType]:
    """(as stored, the same as float32, its type)"""
    if values.ndim == 1:
        return values, values, gguf.GGMLQuantizationType.F32
    data_type = gguf.GGMLQuantizationType[kind]
    data = _random_blocks(values, kind) if kind in _SCALES else gguf.quantize(values, data_type)
    return data, gguf.dequantize(data, data_type).astype(np.float32), data_type


def _random_blocks(values: Any, kind: str) -> Any:
    """Random blocks of a size that gives the numbers the same deviation as `values`."""
    data_type = gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[data_type]
    rows, width = values.shape
    random = np.random.default_rng(rows * width)
    blocks = random.integers(0, 256, (rows * width // block, num_bytes), np.uint8)
    scale = 2.0**-10
    for _ in range(2):
        for offset in _SCALES[kind]:
            blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
        data = blocks.reshape(rows, -1)
        scale *= values.std() / gguf.dequantize(data, data_type).std()
    return data


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "sliding_window", None) and config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    if config.rope_parameters["rope_type"] in ("linear", "yarn"):
        kind = gguf.RopeScalingType(config.rope_parameters["rope_type"])
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if config.rope_parameters["rope_type"] == "yarn":
        original = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The bytes, two special tokens, and two words made from letters."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<bos>", "<eos>", "he", "ll"]
    assert tokens.index("<bos>") == BOS_TOKEN_ID
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[BOS_TOKEN_ID] = types[EOS_TOKEN_ID] = gguf.TokenType.CONTROL
    unused = VOCAB_SIZE - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{number}]" for number in range(unused)])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * unused)
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
