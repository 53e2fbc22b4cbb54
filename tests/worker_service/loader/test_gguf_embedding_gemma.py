"""GGUF files of EmbeddingGemma: attention both ways, pooling, and layers that follow it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from tests.support.gguf_files import SHAPE, make_gguf
from tests.support.loading import load
from tests.support.pooled_texts import PooledTexts
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.loader import LoadedModel
from worker_service.loader.gguf.config import gguf_config, unread_settings
from worker_service.plan import PoolingParams, PoolingType

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = SHAPE["hidden_size"]
TOKENS = [5, 250, 17, 90, 33, 120, 8, 61, 77]
TEXTS = [TOKENS * 3, TOKENS, TOKENS[:1]]  # the first is longer than the window of 8
SHAPES = {"dense_2": (2 * SIZE, SIZE), "dense_3": (SIZE // 2, 2 * SIZE)}


def _weight(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    shape = SHAPES[name]
    values = np.random.default_rng(shape).normal(size=shape) / np.sqrt(shape[1])
    return values.astype(np.float32)


def _file(folder: Path, kind: str = "F32", *layers: str, **dims: int) -> tuple[Path, Path]:
    """A file with these dense layers, and its checkpoint. dims: sizes that are not theirs."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        data_type = gguf.GGMLQuantizationType[kind]
        for name in layers:
            rows, columns = SHAPES[name]
            sizes = {f"{name}_feat_in": columns, f"{name}_feat_out": rows} | dims
            for key, size in sizes.items():
                if key.startswith(name):
                    writer.add_uint32(f"gemma-embedding.{key}", size)
            values = gguf.quantize(_weight(name), data_type)
            writer.add_tensor(f"{name}.weight", values, raw_dtype=data_type)

    return make_gguf("gemma3_embedding", kind, folder, metadata=metadata)


def _vectors(loaded: LoadedModel) -> list[Tensor]:
    params = PoolingParams(type=PoolingType.MEAN)
    return [torch.from_numpy(vector) for vector in PooledTexts(loaded).pool(TEXTS, params)]


def _means(source: Path) -> list[Tensor]:
    model = AutoModel.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([text])).last_hidden_state[0].mean(0) for text in TEXTS]


@pytest.mark.parametrize("layers", [(), ("dense_2", "dense_3")])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_vectors_are_those_of_transformers(
    kind: str, layers: tuple[str, ...], tmp_path: Path
) -> None:
    file, source = _file(tmp_path, kind, *layers)
    assert unread_settings(file) == []
    loaded = load(file)
    assert loaded.pooler is not None
    facts = loaded.pooler.pooling
    size = SHAPES[layers[-1]][0] if layers else SIZE
    assert (facts.default_type, facts.normalize) == (PoolingType.MEAN, True)
    assert facts.vector_size == size
    assert not loaded.model.kv_cache_spec.layers
    for found, expected in zip(_vectors(loaded), _means(source), strict=True):
        for name in layers:
            expected = torch.from_numpy(_weight(name)) @ expected
        assert found.shape == (size,)
        if kind == "F32":
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        assert nn.functional.cosine_similarity(found, expected, dim=0) > 0.999


def test_its_configuration_has_the_window_of_the_file_and_attention_both_ways(
    tmp_path: Path,
) -> None:
    config = gguf_config(_file(tmp_path)[0])
    assert config["use_bidirectional_attention"] is True
    assert config["sliding_window"] == 8
    assert config["layer_types"] == [
        *["sliding_attention"] * 5,
        "full_attention",
        "sliding_attention",
    ]
    (tmp_path / "generator").mkdir()
    file, _ = make_gguf("gemma3", "F32", tmp_path / "generator")
    assert gguf_config(file)["use_bidirectional_attention"] is False


def test_it_does_not_generate(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="runner: expected auto or pooling for Gemma3TextModel"):
        load(_file(tmp_path)[0], runner="generate")


def test_causal_attention_is_refused(tmp_path: Path) -> None:
    file, _ = make_gguf(
        "gemma3_embedding", "F32", tmp_path, metadata=lambda w: w.add_causal_attention(True)
    )
    with pytest.raises(UnsupportedModel, match=r"attention\.causal: expected false, got True"):
        gguf_config(file)


@pytest.mark.parametrize(
    ("layers", "dims", "message"),
    [
        (["dense_2"], {"dense_2_feat_out": 7}, r"dense_2_feat_out: expected 512, .*, got 7"),
        (["dense_3"], {}, r"dense_3\.weight: expected 256 columns, got \[128, 512\]"),
    ],
)
def test_a_layer_of_another_shape_is_refused(
    layers: list[str], dims: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        load(_file(tmp_path, "F32", *layers, **dims)[0])


def test_a_layer_that_the_metadata_alone_have_is_refused(tmp_path: Path) -> None:
    file, _ = make_gguf(
        "gemma3_embedding",
        "F32",
        tmp_path,
        metadata=lambda w: w.add_uint32("gemma-embedding.dense_2_feat_in", 8),
    )
    with pytest.raises(BadCheckpoint, match=r"dense_2_feat_in: expected 0, by .*, got 8"):
        gguf_config(file)
