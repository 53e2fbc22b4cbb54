"""GGUF files of Qwen3 with a classifier, such as those of Qwen3-Reranker."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.support.gguf_files import make_gguf
from tests.support.loading import load
from tests.support.pooled_texts import PooledTexts
from tests.support.transformers_oracle import oracle
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader import LoadedModel
from worker_service.loader.gguf.config import gguf_config
from worker_service.plan import PoolingHead, PoolingParams, PoolingType
from worker_service.pooling_facts import LabelActivation, PoolingFacts

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 256
TOKENS = [5, 250, 17, 90, 33, 120, 8, 61, 77]


def _rows(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(3).normal(size=(count, SIZE)).astype(np.float32) / 8


def _file(
    folder: Path, labels: list[str], *, kind: str = "F32", num_rows: int | None = None
) -> tuple[Path, Path]:
    """A GGUF file with a classifier as llama.cpp's converter writes it, and its checkpoint."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(labels)
        writer.add_tensor("cls.output.weight", _rows(num_rows or len(labels)))

    return make_gguf("qwen3", kind, folder, metadata=metadata)


def _facts(loaded: LoadedModel) -> PoolingFacts:
    assert loaded.pooler is not None
    return loaded.pooler.pooling


def _logits(loaded: LoadedModel) -> torch.Tensor:
    params = PoolingParams(type=PoolingType.LAST, head=PoolingHead.CLASSIFIER)
    return torch.from_numpy(PooledTexts(loaded).pool([TOKENS], params)[0])


def _expected(source: Path) -> torch.Tensor:
    """The hidden state of the last token."""
    model = oracle(source).model
    with torch.inference_mode():
        return model.model(input_ids=torch.tensor([TOKENS])).last_hidden_state[0, -1]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_label_of_a_reranker_has_the_softmax_of_both_rows(kind: str, tmp_path: Path) -> None:
    file, source = _file(tmp_path, ["yes", "no"], kind=kind)
    loaded = load(file)
    facts = _facts(loaded)
    assert (facts.labels, facts.scores_pairs) == (("yes",), True)
    assert facts.label_activation is LabelActivation.SIGMOID
    assert "<Query>: {{ query }}\n<Document>: {{ document }}" in facts.pair_template
    expected = torch.softmax(torch.from_numpy(_rows(2)) @ _expected(source), 0)[0]
    tolerance = 2e-5 if kind == "F32" else 2e-2
    torch.testing.assert_close(_logits(loaded).sigmoid()[0], expected, atol=tolerance, rtol=0)


def test_other_labels_have_a_logit_each(tmp_path: Path) -> None:
    file, source = _file(tmp_path, ["bad", "fair", "good"])
    loaded = load(file)
    facts = _facts(loaded)
    assert (facts.labels, facts.scores_pairs) == (("bad", "fair", "good"), False)
    assert (facts.label_activation, facts.pair_template) == (LabelActivation.SOFTMAX, "")
    expected = torch.from_numpy(_rows(3)) @ _expected(source)
    torch.testing.assert_close(_logits(loaded), expected, atol=1e-4, rtol=0)


def test_a_classifier_without_its_rows_or_labels_is_refused_by_name(tmp_path: Path) -> None:
    file, _ = _file(tmp_path, ["yes", "no"], num_rows=3)
    with pytest.raises(BadCheckpoint, match=r"classifier\.output_labels: expected 3 labels, got"):
        gguf_config(file)

    def rank(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)

    file, _ = make_gguf("qwen3", "F32", tmp_path / "bare", metadata=rank)
    message = r"pooling_type: expected .* with tensors cls\.output, got 4"
    with pytest.raises(UnsupportedModel, match=message):
        gguf_config(file)
