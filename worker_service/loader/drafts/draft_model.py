"""A model that drafts tokens for another one."""

from dataclasses import replace

import torch

from worker_service.config import CacheConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, WorkerError
from worker_service.loader.load import load_model
from worker_service.loader.loaded_model import LoadedModel
from worker_service.models.interface import Model


def load_draft_model(name: str, target: LoadedModel, cache: CacheConfig) -> Model:
    """Load the model `name`, which drafts tokens for `target`, with the same KV block size.

    Raises a `WorkerError` that names `speculative_model`, also if the vocabularies differ.
    """
    config = replace(
        target.config,
        model=name,
        revision=None,
        hf_overrides=None,
        max_model_len=None,
        layout=Layout(),  # the rank that samples has the whole draft model
        threads=torch.get_num_threads(),
        cpus=None,  # the threads are pinned already
    )
    try:
        draft = load_model(config, replace(cache, block_size=target.block_size))
    except WorkerError as error:
        raise type(error)(f"speculative_model: {error}") from error
    if (got := draft.model.vocab_size) != (expected := target.model.vocab_size):
        raise InvalidOption(
            f"speculative_model: expected a model with the {expected} tokens of"
            f" {target.config.model}, got {name} with {got}"
        )
    if draft.model.kv_cache_spec.has_states:
        raise InvalidOption(
            f"speculative_model: expected a model without states, got {name}, of whose layers some"
            " keep one"
        )
    if any(group.chunk for group in draft.model.kv_cache_spec.groups(target.block_size)):
        raise InvalidOption(
            f"speculative_model: expected a model without chunked attention, got {name}, whose"
            " chunks are shorter than its sequences"
        )
    return draft.model
