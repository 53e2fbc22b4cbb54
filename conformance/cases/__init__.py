"""The cases, a module for each topic, in the order in which a worker is best written."""

from conformance.case import Case, registered
from conformance.cases import (
    batches,
    beams,
    blocks,
    cache_operations,
    constraints,
    draws,
    epochs,
    errors,
    forks,
    info,
    logprobs,
    ordering,
    prompt_logprobs,
    registration,
    robustness,
    sampling,
    sequences,
    setup,
    steps,
    swaps,
)

_TOPICS = (
    setup,
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
    sampling,
    draws,
    constraints,
    logprobs,
    prompt_logprobs,
    beams,
    errors,
    robustness,
    registration,  # last, since it stops the worker
)

ALL: list[Case] = [case for topic in _TOPICS for case in registered(topic.__name__)]
