"""GGUF files of tiny text encoders, as llama.cpp's converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.support.encoders import VOCAB_SIZE, make_encoder
from tests.support.gguf_files import write

_ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "roberta": gguf.MODEL_ARCH.BERT,
    "distilbert": gguf.MODEL_ARCH.BERT,
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
}
_PREFIXES = ("bert.", "roberta.", "distilbert.", "nomic_bert.", "model.")
WORDS = ("hello", "world", "un", "##believ", "##able", ",", "caf", "##e", "##é", "é")

Metadata = Callable[[gguf.GGUFWriter], object]


def make_encoder_gguf(
    family: str,
    folder: Path,
    kind: str = "F32",
    *,
    head: str = "Model",
    metadata: Metadata = lambda writer: None,
    **changes: Any,
) -> tuple[Path, Path]:
    """(a GGUF file with matrices of type `kind`, the checkpoint that it was made from)

    head: end of the class name; metadata: adds to the file's metadata.
    """
    source = make_encoder(family, folder, head, **changes)
    config = json.loads((source / "config.json").read_text())
    number = _ARCHITECTURES[family]
    file = folder / f"{family}{head}.gguf"
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[number])
    offset = 1 + config["pad_token_id"] if family == "roberta" else 0
    add_metadata(writer, config, offset)
    add_word_pieces(writer, [*WORDS, *(f"word{i}" for i in range(VOCAB_SIZE - len(WORDS) - 5))])
    metadata(writer)
    names = gguf.get_tensor_name_map(number, 3)
    for name, tensor in load_file(source / "model.safetensors").items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name.startswith("pooler."):
            continue
        if family == "modernbert" and name.startswith("classifier."):
            name = name.replace("classifier.", "classifier.out_proj.")
        values = tensor.numpy()[offset if "position_embeddings" in name else 0 :]
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        data_type = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        if values.ndim > 1 and "norm" not in stored_name:
            writer.add_tensor(stored_name, gguf.quantize(values, data_type), raw_dtype=data_type)
        else:
            writer.add_tensor(stored_name, np.ascontiguousarray(values))
    write(writer)
    return file, source


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], offset: int = 0) -> None:
    """Add the metadata of a model with this `config.json`."""
    writer.add_block_count(3)
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_causal_attention(False)
    epsilon = config.get("layer_norm_eps") or config.get("norm_eps") or 1e-12
    writer.add_layer_norm_eps(epsilon)
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(3)
        writer.add_vocab_size(VOCAB_SIZE)
    elif rope:
        writer.add_rope_freq_base(rope["rope_theta"])


def add_word_pieces(writer: gguf.GGUFWriter, words: list[str]) -> None:
    """Add a tokenizer of BERT's kind with these words, in which `##` continues one."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [word[2:] if word.startswith("##") else f"▁{word}" for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(special + tokens)
    types = [gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * len(words)
    writer.add_token_types(types)
    writer.add_token_type_count(2)
    writer.add_unk_token_id(1)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
