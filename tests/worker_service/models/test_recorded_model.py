"""Whole models on a CPU: recorded and eager steps give the same bits."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewire_kernels.cpu.native_library import library
from pagewire_kernels.cpu.recorded_model import RecordedModel
from tests.support.cases import each_with_one_of
from tests.support.checkpoints import NATIVE_FAMILIES, VOCAB_SIZE, checkpoint
from tests.support.encoders import FAMILIES, encode, load_encoder, make_encoder, texts
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from worker_service.models.native import NativeModel

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(library() is None, reason="no compiled kernels for this processor"),
]


def _model(family: str, dtype: str) -> NativeModel:
    model = load(checkpoint(family), dtype=dtype).model
    assert isinstance(model, NativeModel)
    return model


def _tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def _steps() -> Iterator[list[tuple[int, int, list[int]]]]:
    """Prefills, chunks and decodes, apart and mixed; the third is larger than those before."""
    a, b, c = _tokens(40, 0), _tokens(70, 1), _tokens(33, 2)
    yield [(0, 0, a[:9])]
    yield [(0, 9, a[9:10]), (1, 0, b[:20])]
    yield [(0, 10, a[10:11]), (1, 20, b[20:69]), (2, 0, c)]
    yield [(0, 11, a[11:12]), (1, 69, b[69:])]
    yield [(0, 12, a[12:40])]


@pytest.mark.parametrize(
    ("family", "dtype", "num_threads"),
    each_with_one_of(NATIVE_FAMILIES, ("float32", 1), ("bfloat16", 3)),
)
def test_a_recorded_step_gives_the_same_bits_as_an_eager_one(
    family: str, dtype: str, num_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    torch.set_num_threads(num_threads)
    model = _model(family, dtype)
    recorded, eager = PagedDriver(model), PagedDriver(model)
    program = model._program
    assert program is not None
    assert isinstance(program.run, RecordedModel)
    for step in _steps():
        model._program = program
        logits = recorded.run(step)
        model._program = None
        assert all(map(torch.equal, logits, eager.run(step)))
        assert "layers run eagerly" not in caplog.text
    assert torch.equal(recorded.pool, eager.pool)


@pytest.mark.parametrize(("dtype", "num_threads"), [("float32", 1), ("bfloat16", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_encoder_gives_the_same_bits_as_an_eager_one(
    family: str,
    dtype: str,
    num_threads: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    torch.set_num_threads(num_threads)
    model = load_encoder(make_encoder(family, tmp_path), getattr(torch, dtype))
    program = model._program
    assert program is not None
    assert isinstance(program.run, RecordedModel)
    for lengths in ([9], [1, 20], [70, 3, 41], [5]):
        batch = texts(lengths)
        model._program = program
        found = encode(model, batch)
        model._program = None
        assert all(map(torch.equal, found, encode(model, batch)))
    assert "model recorded" in caplog.text
    assert "not recorded" not in caplog.text
    assert "layers run eagerly" not in caplog.text
