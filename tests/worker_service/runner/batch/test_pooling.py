"""Vectors of texts: those of `transformers`, and the same bits however they are computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire_kernels.batch import RowAdapters, StepBatch
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.counting_model import loaded_counting_model
from tests.support.loading import load
from tests.support.pooled_texts import BLOCK_SIZE, PooledTexts
from tests.support.transformers_oracle import oracle
from worker_service.config import CacheConfig
from worker_service.engine.executor import BlockCounts
from worker_service.errors import InvalidPlan
from worker_service.kv_cache.memory_budget import SyntheticBatches, profile_blocks
from worker_service.loader import LoadedModel
from worker_service.loader.trial import try_model
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.plan import PoolingHead, PoolingParams, PoolingType, RowErrorReason
from worker_service.pooling_facts import PoolingFacts

pytestmark = pytest.mark.usefixtures("one_thread")

LAST, MEAN, CLS, ALL = PoolingType.LAST, PoolingType.MEAN, PoolingType.CLS, PoolingType.ALL
FAMILIES = ("llama", "qwen3")
TOLERANCE = 2e-5

REDUCE: dict[PoolingType, Callable[[Tensor], Tensor]] = {
    LAST: lambda hidden: hidden[-1],
    MEAN: lambda hidden: hidden.mean(0),
    CLS: lambda hidden: hidden[0],
    ALL: lambda hidden: hidden,
}


@cache
def _loaded(family: str, dtype: str = "float32") -> LoadedModel:
    return load(checkpoint(family), dtype=dtype, runner="pooling")


@pytest.fixture(params=[False, True], ids=["host", "device"])
def on_device(request: pytest.FixtureRequest) -> bool:
    """Whether steps are launched as on a GPU."""
    return bool(request.param)


def _texts(lengths: Sequence[int] = (1, 2, 5, 9, 17, 26, 33)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def _hidden(family: str, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        decoder = oracle(checkpoint(family)).model.model
        hidden: Tensor = decoder(torch.tensor([list(tokens)])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("kind", PoolingType)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family: str, kind: PoolingType, on_device: bool) -> None:
    found = PooledTexts(_loaded(family), on_device=on_device).pool(
        _texts(), PoolingParams(type=kind)
    )
    for tokens, vector in zip(_texts(), found, strict=True):
        expected = REDUCE[kind](_hidden(family, tokens)).flatten()
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PoolingType)
def test_a_vector_has_the_same_bits_alone_in_chunks_and_on_another_runner(
    kind: PoolingType, dtype: str, on_device: bool
) -> None:
    loaded, params = _loaded("llama", dtype), PoolingParams(type=kind, normalize=True)
    together = PooledTexts(loaded).pool(_texts(), params)
    runner = PooledTexts(loaded, on_device=on_device)
    alone = [runner.pool([tokens], params)[0] for tokens in _texts()]
    for chunk in (1, 7, 32):
        chunked = runner.pool(_texts(), params, chunk)
        for vectors in zip(together, alone, chunked, strict=True):
            assert len({vector.tobytes() for vector in vectors}) == 1


def test_a_vector_after_a_cached_prefix_has_the_same_bits(on_device: bool) -> None:
    runner, params = PooledTexts(_loaded("llama"), on_device=on_device), PoolingParams(type=LAST)
    tokens = _texts()[-1]
    first = runner.add(tokens, params)
    expected = runner.step([(first.seq_id, len(tokens), True)], [first]).vectors[0]
    prefix = 2 * BLOCK_SIZE
    again = runner.add(tokens, params, tables=first.tables, num_computed_tokens=prefix)
    found = runner.step([(again.seq_id, len(tokens) - prefix, True)], [again]).vectors[0]
    assert found.tobytes() == expected.tobytes()


def test_a_vector_is_shortened_and_then_normalized(on_device: bool) -> None:
    runner, texts = PooledTexts(_loaded("llama"), on_device=on_device), _texts()
    full = runner.pool(texts, PoolingParams(type=MEAN))
    shaped = runner.pool(texts, PoolingParams(type=MEAN, dimensions=24, normalize=True))
    for vector, short in zip(full, shaped, strict=True):
        np.testing.assert_allclose(short, vector[:24] / np.linalg.norm(vector[:24]), rtol=1e-6)


def test_texts_of_several_kinds_share_a_step(on_device: bool) -> None:
    runner, texts = PooledTexts(_loaded("llama"), on_device=on_device), _texts()
    kinds = [PoolingParams(type=kind, normalize=kind is CLS) for kind in (LAST, CLS, ALL, MEAN)]
    new = [runner.add(tokens, kind) for tokens, kind in zip(texts[3:], kinds, strict=True)]
    result = runner.step([(text.seq_id, len(text.token_ids), True) for text in new], new)
    for row, (text, params) in enumerate(zip(new, kinds, strict=True)):
        (alone,) = runner.pool([text.token_ids.tolist()], params)
        assert result.vectors[row].tobytes() == alone.tobytes()


class SumsOfTexts:
    """Keeps no KV: a token's hidden state is (its text's sum, its own type)."""

    kv_cache_spec = KVCacheSpec(layers=(), dtype=torch.float32)
    architecture, vocab_size, num_parameters, max_model_len = "Sums", VOCAB_SIZE, 0, 64
    pooling = PoolingFacts(vector_size=2, types=tuple(PoolingType), labels=("sum", "type"))

    def forward(self, batch: StepBatch) -> Tensor:
        """[num_tokens, 2]."""
        (metadata,), types = batch.attention, batch.token_types
        assert types is not None
        assert len(metadata.slot_mapping) == 0
        lengths = metadata.query_start.diff().tolist()
        sums = [part.sum().expand(len(part)) for part in batch.token_ids.split(lengths)]
        return torch.stack([torch.cat(sums), types], 1).float()

    def compute_logits(self, hidden_states: Tensor, adapters: RowAdapters = ()) -> Tensor:
        """What trial runs compare."""
        return hidden_states

    def pool(self, pooled: Tensor, head: PoolingHead) -> Tensor:
        """The logits are the vector's negatives."""
        return -pooled if head is PoolingHead.CLASSIFIER else pooled


def _without_cache(**changes: Any) -> LoadedModel:
    model = SumsOfTexts()
    model.pooling = replace(model.pooling, **changes)
    return replace(loaded_counting_model(model), pooler=model)  # type: ignore[arg-type]


def test_a_model_without_cache_groups_sees_whole_texts_and_the_types_of_their_tokens(
    on_device: bool,
) -> None:
    runner = PooledTexts(_without_cache(), on_device=on_device)
    params = PoolingParams(type=MEAN, second_text_start=3)
    texts = [[5, 6, 7, 8], [1] * 6, [9, 9, 9]]
    found = [vector.tolist() for vector in runner.pool(texts, params)]
    assert found == [[26.0, 0.25], [6.0, 0.5], [27.0, 0.0]]
    assert runner.pool([[4, 4]], PoolingParams(type=CLS))[0].tolist() == [8.0, 0.0]


def test_the_classifier_of_tokens_brings_logits_for_each(on_device: bool) -> None:
    runner = PooledTexts(_without_cache(classifier_type=ALL), on_device=on_device)
    params = PoolingParams(type=ALL, head=PoolingHead.CLASSIFIER)
    assert runner.pool([[1, 2]], params)[0].tolist() == [-3.0, 0.0, -3.0, 0.0]


def test_a_model_without_cache_groups_is_tried_and_profiled_with_whole_texts() -> None:
    model, cpu = SumsOfTexts(), torch.device("cpu")
    assert try_model(model, cpu, 4)
    batches = SyntheticBatches(model, 4, cpu, generates=False)
    counts = profile_blocks(batches, CacheConfig(), max_num_seqs=4, max_num_batched_tokens=64)
    assert counts == BlockCounts(num_gpu_blocks=0, num_cpu_blocks=0)


class PoisonedTexts(SumsOfTexts):
    """Vectors of texts whose sum is 13 are not finite."""

    def forward(self, batch: StepBatch) -> Tensor:
        """[num_tokens, 2]."""
        hidden = super().forward(batch)
        return hidden.masked_fill(hidden[:, :1] == 13, torch.nan)


def test_a_vector_that_is_not_finite_fails_its_row_alone(on_device: bool) -> None:
    model = PoisonedTexts()
    loaded = replace(loaded_counting_model(model), pooler=model)  # type: ignore[arg-type]
    runner, params = PooledTexts(loaded, on_device=on_device), PoolingParams(type=LAST)
    new = [runner.add(tokens, params) for tokens in ([4], [6, 7], [5, 5])]
    result = runner.step([(text.seq_id, len(text.token_ids), True) for text in new], new)
    assert {row: vector.tolist() for row, vector in result.vectors.items()} == {
        0: [4.0, 0.0],
        2: [10.0, 0.0],
    }
    assert result.errors == {1: RowErrorReason.NON_FINITE_LOGITS}


@pytest.mark.parametrize(
    ("params", "fields", "error"),
    [
        (None, {}, r"sampling: this worker generates no tokens"),
        ({"type": ALL}, {}, r"pooling.type: expected LAST or MEAN, got ALL"),
        ({"type": MEAN}, {"num_computed_tokens": 1}, r"num_computed_tokens: expected 0 with the"),
        ({"type": LAST}, {"parent_seq_id": 1}, r"parent_seq_id: expected none with pooling"),
        ({"type": LAST}, {"num_prompt_tokens": 2}, r"num_prompt_tokens: expected all tokens"),
        ({"type": LAST, "dimensions": 65}, {}, r"pooling.dimensions: expected 0 to 64, got 65"),
        ({"type": LAST, "head": PoolingHead.CLASSIFIER}, {}, r"head: the model has no labels"),
    ],
)
def test_texts_that_the_model_cannot_pool_are_refused_by_field(
    params: dict[str, Any] | None, fields: dict[str, Any], error: str
) -> None:
    loaded = _loaded("llama")
    assert loaded.pooler is not None
    facts = replace(loaded.pooler.pooling, types=(LAST, MEAN))
    pooler: Any = type("Pooler", (), {"pooling": facts})
    runner = PooledTexts(replace(loaded, pooler=pooler))
    new = runner.add([1, 2, 3], PoolingParams(type=LAST), **fields)
    new = replace(new, pooling=None if params is None else PoolingParams(**params))
    with pytest.raises(InvalidPlan, match=error):
        runner.step([(new.seq_id, 3, True)], [new])


@pytest.mark.parametrize(
    ("kind", "num_tokens", "brings", "error"),
    [
        (LAST, 2, True, r"output: .* brings its output before its last token"),
        (ALL, 2, False, r"output: .* has 0, expected 3"),
        (LAST, 2, False, r"num_tokens: .* computes a part of a text that must be computed at once"),
    ],
)
def test_rows_that_contradict_their_text_are_refused(
    kind: PoolingType, num_tokens: int, brings: bool, error: str
) -> None:
    loaded = _without_cache() if "at once" in error else _loaded("llama")
    runner = PooledTexts(loaded)
    new = runner.add([1, 2, 3], PoolingParams(type=kind))
    with pytest.raises(InvalidPlan, match=error):
        runner.step([(new.seq_id, num_tokens, brings)], [new])
