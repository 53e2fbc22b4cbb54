"""GGUF files with queries, keys and values in one tensor, which llama.cpp reads of most
architectures."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.support.gguf_files import make_gguf, write
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from worker_service.errors import BadCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [5, 250, 17, 90, 33, 120, 8, 61, 77]


def _joined(file: Path, target: Path, parts: tuple[str, ...] = ("q", "k", "v")) -> Path:
    """The file with these tensors of attention, and their biases, joined in each layer."""
    reader = gguf.GGUFReader(file)
    fields = {name: field for name, field in reader.fields.items() if "GGUF." not in name}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in list(tensors):
        _, _, kind = name.rpartition(".")
        stem = name.removesuffix(f".attn_q.{kind}")
        if stem != name:
            joined = [tensors.pop(f"{stem}.attn_{part}.{kind}") for part in parts]
            rows, stored = np.concatenate([part.data for part in joined]), joined[0].tensor_type
            writer.add_tensor(f"{stem}.attn_qkv.{kind}", rows, raw_dtype=stored)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    write(writer)
    return target


def _logits(file: Path) -> torch.Tensor:
    return PagedDriver(load(file).model).run([(0, 0, TOKENS)])[0]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q8_0"), ("qwen2", "F32"), ("qwen3", "Q4_K"), ("gemma2", "BF16"), ("olmoe", "Q8_0")],
)
def test_logits_are_those_of_a_file_with_three_tensors(
    family: str, kind: str, tmp_path: Path
) -> None:
    file, _ = make_gguf(family, kind, tmp_path)
    joined = _joined(file, tmp_path / "joined.gguf")
    assert torch.equal(_logits(joined), _logits(file))


def test_another_number_of_rows_is_refused_by_name(tmp_path: Path) -> None:
    file, _ = make_gguf("qwen2", "F32", tmp_path)
    joined = _joined(file, tmp_path / "joined.gguf", ("q", "k"))
    expected = r"blk\.\d\.attn_qkv\.(weight|bias): expected \d+ rows of queries, keys and values"
    with pytest.raises(BadCheckpoint, match=expected):
        load(joined)
