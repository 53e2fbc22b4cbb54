"""Drives a runner with texts, whose vectors it returns."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from tests.support.runners import HostEvent, make_cache
from worker_service.array_types import Float32Array
from worker_service.engine.executor import Runner
from worker_service.loader import LoadedModel
from worker_service.plan import (
    BlockTable,
    NewSequence,
    PoolingParams,
    PoolingType,
    RowOutput,
    SamplerParams,
    StepPlan,
    StepResult,
)
from worker_service.runner.batch.pooling import Pooling
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner

BLOCK_SIZE = 8
NUM_BLOCKS = 64

_NONE = np.empty(0, np.int32)


def runner_of(loaded: LoadedModel, *, on_device: bool = False) -> ModelRunner:
    """A runner of a model that pools, on the host or as on a device."""
    assert loaded.pooler is not None
    model = loaded.model
    blocks = NUM_BLOCKS if model.kv_cache_spec.layers else 0
    cache = make_cache(model, BLOCK_SIZE, num_gpu_blocks=blocks, num_cpu_blocks=0)
    pooling = Pooling(loaded.pooler, loaded.kernels.layers.sum_rows)
    device = None
    if on_device:
        state = DeviceState(model, cache, BLOCK_SIZE, StateShape())
        device = DeviceSteps(model, cache, state, HostEvent, pooling=pooling)
    return ModelRunner(model, cache, BLOCK_SIZE, device=device, pooling=pooling)


class PooledTexts:
    """Texts of one runner."""

    def __init__(
        self, loaded: LoadedModel, *, on_device: bool = False, runner: Runner | None = None
    ) -> None:
        """runner: None makes one."""
        self._groups = len(loaded.model.kv_cache_spec.groups(BLOCK_SIZE))
        self.runner: Runner = runner or runner_of(loaded, on_device=on_device)
        self._ids, self._steps, self._next_block = count(1), count(), 0

    def add(self, tokens: Sequence[int], params: PoolingParams, **fields: Any) -> NewSequence:
        """A new sequence, with blocks of its own for all its tokens."""
        size = -(-len(tokens) // BLOCK_SIZE)
        table = BlockTable(
            group=0,
            first_index=0,
            block_ids=np.arange(self._next_block, self._next_block + size, dtype=np.int32),
        )
        self._next_block = (self._next_block + size) % (NUM_BLOCKS - 16)
        values: dict[str, Any] = {
            "seq_id": next(self._ids),
            "choice_index": 0,
            "token_ids": np.array(tokens, np.int32),
            "num_prompt_tokens": len(tokens),
            "num_computed_tokens": 0,
            "tables": (table,) * self._groups,
            "sampling": SamplerParams(),
            "parent_seq_id": None,
            "prompt_logprobs_start": 0,
            "pooling": params,
        }
        return NewSequence(**{**values, **fields})

    def step(
        self,
        rows: Sequence[tuple[int, int, bool]],
        new: Sequence[NewSequence] = (),
        forgotten: Sequence[int] = (),
    ) -> StepResult:
        """One step. rows: sequence id, number of tokens, whether it brings a vector."""
        ids, numbers, brings = (np.array(column) for column in zip(*rows, strict=True))
        plan = StepPlan(
            epoch=1,
            step_id=next(self._steps),
            forget_seq_ids=np.array(forgotten, np.int32),
            swap_out=_NONE.reshape(0, 2),
            swap_in=_NONE.reshape(0, 2),
            copy=_NONE.reshape(0, 2),
            new_sequences=tuple(new),
            block_updates=_NONE.reshape(0, 4),
            seq_ids=ids.astype(np.int32),
            num_tokens=numbers.astype(np.int32),
            output=np.where(brings, RowOutput.VECTOR, RowOutput.NOTHING).astype(np.int32),
            lookahead=np.zeros(len(rows), np.int32),
            appended_tokens=_NONE.reshape(0, 2),
        )
        return self.runner.launch(plan).collect()

    def pool(
        self, texts: Sequence[Sequence[int]], params: PoolingParams, chunk: int | None = None
    ) -> list[Float32Array]:
        """The vectors of some texts, computed in one batch, at most `chunk` tokens of one in a
        step; those of tokens one after the other."""
        new = {i: self.add(tokens, params) for i, tokens in enumerate(texts)}
        parts: Mapping[int, list[Float32Array]] = {i: [] for i in new}
        size, start = chunk or max(map(len, texts)), 0
        added: Sequence[NewSequence] = [*new.values()]
        while start < max(map(len, texts)):
            present = [i for i in new if start < len(texts[i])]
            rows = []
            for i in present:
                end = min(start + size, len(texts[i]))
                brings = end == len(texts[i]) or params.type is PoolingType.ALL
                rows.append((new[i].seq_id, end - start, brings))
            result = self.step(rows, added)
            assert not result.errors
            for row, vector in result.vectors.items():
                parts[present[row]].append(vector)
            start, added = start + size, ()
        return [np.concatenate(found) for found in parts.values()]
