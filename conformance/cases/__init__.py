"""The cases, a module for each topic, in a good order for writing a worker."""

from importlib import import_module

from conformance.case import Case, registered

_TOPICS = (
    # `caches` comes early: one of its cases needs a worker that has had no caches.
    *("setup", "caches", "info", "steps", "ordering", "epochs"),
    *("sequences", "batches", "blocks", "forks", "cache_operations", "swaps", "groups", "contexts"),
    *("moves", "records", "adapters"),
    *("sampling", "draws", "edits", "logprobs", "prompt_logprobs", "beams", "drafts", "pooling"),
    *("structured_output", "constrained_rows", "errors", "robustness"),
    "registration",  # last, since it stops the worker
)

ALL: list[Case] = [
    case for topic in _TOPICS for case in registered(import_module(f"{__name__}.{topic}").__name__)
]
