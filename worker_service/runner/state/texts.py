"""Texts: sequences whose hidden states become vectors."""

from dataclasses import dataclass

from torch import Tensor

from worker_service.errors import InvalidPlan
from worker_service.plan import NewSequence, PoolingHead, PoolingType
from worker_service.plan import PoolingParams as Params
from worker_service.pooling_facts import PoolingFacts


@dataclass(slots=True)
class Text:
    """How a text is pooled, and what its earlier rows left for the last one."""

    params: Params
    partial: Tensor | None = None
    """float32 [hidden_size]: the sum so far, or the first hidden state."""


def check_work(new: NewSequence, facts: PoolingFacts | None, field: str) -> None:
    """Raise InvalidPlan if a sequence is not the model's work. facts: None: it generates tokens."""
    params = new.pooling
    if facts is None and params is not None:
        raise InvalidPlan(f"{field}.pooling", "this worker pools no vectors")
    if facts is None or params is None:
        if facts is not None:
            raise InvalidPlan(f"{field}.sampling", "this worker generates no tokens")
        return
    if new.parent_seq_id is not None:
        raise InvalidPlan(f"{field}.parent_seq_id", "expected none with pooling")
    if new.num_prompt_tokens != len(new.token_ids):
        raise InvalidPlan(f"{field}.num_prompt_tokens", "expected all tokens with pooling")
    if new.num_computed_tokens and params.type is not PoolingType.LAST:
        problem = f"expected 0 with the type {params.type.name}, got {new.num_computed_tokens}"
        raise InvalidPlan(f"{field}.num_computed_tokens", problem)
    _check_params(params, facts, f"{field}.pooling")


def _check_params(params: Params, facts: PoolingFacts, field: str) -> None:
    types, size = facts.types, facts.vector_size
    if params.head is PoolingHead.CLASSIFIER:
        types, size = (facts.classifier_type,), 0
        if not facts.labels or params.normalize:
            problem = "expected no normalization" if facts.labels else "the model has no labels"
            raise InvalidPlan(f"{field}.head", problem)
    elif not size:
        raise InvalidPlan(f"{field}.head", "expected CLASSIFIER, since the model makes no vectors")
    if params.type not in types:
        expected = f"expected {' or '.join(kind.name for kind in types)}"
        raise InvalidPlan(f"{field}.type", f"{expected}, got {params.type.name}")
    if params.dimensions > size:
        raise InvalidPlan(f"{field}.dimensions", f"expected 0 to {size}, got {params.dimensions}")
