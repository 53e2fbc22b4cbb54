"""What is not in the key of KV does not change it, for every field that a worker gets of a
sequence. A new field fails here until it is in one of the tables."""

from typing import Any

import pytest
import torch

from pagewire.v1 import context_pb2, plan_pb2, pooling_pb2, sampling_pb2
from tests.support.checkpoints import checkpoint
from tests.support.loading import load
from tests.support.runners import host
from tests.support.worker_driver import PlanBuilder, Row, column, sampler_params
from worker_service.errors import InvalidPlan
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import LoadedModel
from worker_service.service import wire

BLOCK_SIZE = 4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]

IN_KEY = {"token_ids", "context"}
"""Fields of `NewSequence` that are hashed: `scheduler_service/core/kv_cache/prefix_keys.py`."""

PLACES = {"tables", "num_computed_tokens", "parent_seq_id"}
"""Fields that say where KV is. The core fills them by key, and the worker writes nothing there
before `num_computed_tokens`."""

REFUSED = {"pooling"}
"""Fields that this worker refuses."""

OTHERS: dict[str, Any] = {
    "seq_id": 77,
    "choice_index": 3,
    "num_prompt_tokens": 9,
    "prompt_logprobs_start": 4,
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
"""Other fields, with another value than the default."""

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": [sampling_pb2.LogitBias(token_id=5, bias=9)],
    "seed": 7,
    "min_tokens": 2,
    "suppressed_token_ids": column([5]),
    "bad_words": [sampling_pb2.TokenSequence(token_ids=column([5, 6]))],
    "logprobs": 2,
    "prompt_logprobs": 2,
    "num_candidates": 4,
    "constraint": sampling_pb2.Constraint(regex="a+", end_token_ids=column([1])),
}
"""All sampling parameters: they act on logits."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(checkpoint("llama"))


def kv_of(loaded: LoadedModel, **fields: Any) -> torch.Tensor:
    """The KV of a prompt of full blocks, computed in two steps."""
    spec, device = loaded.model.kv_cache_spec, torch.device("cpu")
    cache = CacheEngine(
        spec, block_size=BLOCK_SIZE, num_gpu_blocks=8, num_cpu_blocks=0, device=device
    )
    runner, plans = host(loaded.model, cache, BLOCK_SIZE), PlanBuilder(block_size=BLOCK_SIZE)
    values: dict[str, Any] = {"seq_id": 1, "token_ids": PROMPT, "sampling": sampler_params()}
    values |= fields
    plans.add(**values)
    for row in (Row(values["seq_id"], 7, sample=False), Row(values["seq_id"], 5)):
        runner.launch(wire.decode_plan(plans.plan([row]), 0)).collect()
    return cache.device_cache[: len(PROMPT) // BLOCK_SIZE]


def test_every_field_of_a_sequence_is_in_the_key_or_of_no_effect() -> None:
    fields = set(plan_pb2.NewSequence.DESCRIPTOR.fields_by_name)
    assert fields == IN_KEY | PLACES | REFUSED | OTHERS.keys() | {"sampling"}
    assert SAMPLING.keys() == set(sampling_pb2.SamplerParams.DESCRIPTOR.fields_by_name)


def test_other_tokens_have_other_kv(loaded: LoadedModel) -> None:
    changed = kv_of(loaded, token_ids=[*PROMPT[:6], 99, *PROMPT[7:]])
    assert torch.equal(changed[0], kv_of(loaded)[0])
    assert not torch.equal(changed[1], kv_of(loaded)[1])


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_is_not_in_the_key_changes_no_kv(loaded: LoadedModel, name: str) -> None:
    changed = kv_of(loaded, **{name: OTHERS[name]})
    assert torch.equal(changed, kv_of(loaded))


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_parameter_changes_no_kv(loaded: LoadedModel, name: str) -> None:
    changed = kv_of(loaded, sampling=sampler_params(**{name: SAMPLING[name]}))
    assert torch.equal(changed, kv_of(loaded))


def part(kind: Any, digest: bytes = bytes(32)) -> context_pb2.ContextPart:
    return context_pb2.ContextPart(kind=kind, digest=digest)


def test_a_salt_changes_no_kv(loaded: LoadedModel) -> None:
    changed = kv_of(loaded, context=[part(context_pb2.CONTEXT_KIND_SALT)])
    assert torch.equal(changed, kv_of(loaded))


def test_a_sequence_for_a_vector_is_refused(loaded: LoadedModel) -> None:
    pooling = pooling_pb2.PoolingParams(type=pooling_pb2.POOLING_TYPE_LAST)
    with pytest.raises(InvalidPlan, match="pooling"):
        kv_of(loaded, pooling=pooling)


@pytest.mark.parametrize("name", ["ADAPTER", "MEDIA"])
def test_a_part_that_the_worker_does_not_compute_is_refused(loaded: LoadedModel, name: str) -> None:
    kind = context_pb2.ContextKind.Value(f"CONTEXT_KIND_{name}")
    with pytest.raises(InvalidPlan) as error:
        kv_of(loaded, context=[part(kind)])
    assert error.value.field == "new_sequences[0].context[0].kind"
    assert error.value.expected == f"expected SALT, the only kind computed here, got {name}"
