"""The cases, a module for each topic, in a good order for writing a worker."""

from conformance.case import Case, registered
from conformance.cases import (
    batches,
    beams,
    blocks,
    cache_operations,
    caches,
    constrained_rows,
    contexts,
    drafts,
    draws,
    edits,
    epochs,
    errors,
    forks,
    groups,
    info,
    logprobs,
    ordering,
    pooling,
    prompt_logprobs,
    registration,
    robustness,
    sampling,
    sequences,
    setup,
    steps,
    structured_output,
    swaps,
)

_TOPICS = (
    setup,
    caches,  # before the others: one of its cases needs a worker that has had no caches
    info,
    steps,
    ordering,
    epochs,
    sequences,
    batches,
    blocks,
    forks,
    cache_operations,
    swaps,
    groups,
    contexts,
    sampling,
    draws,
    edits,
    logprobs,
    prompt_logprobs,
    beams,
    drafts,
    pooling,
    structured_output,
    constrained_rows,
    errors,
    robustness,
    registration,  # last, since it stops the worker
)

ALL: list[Case] = [case for topic in _TOPICS for case in registered(topic.__name__)]
