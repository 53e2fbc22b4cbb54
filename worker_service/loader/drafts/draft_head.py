"""Building a draft head, and filling it from its checkpoint and from that of its target."""

import logging

import torch

from pagewire_kernels.select import Kernels
from worker_service.load_progress import LoadProgress
from worker_service.loader.loaded_model import LoadedModel
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import Checkpoint, open_checkpoint
from worker_service.loader.weights.fill import EagerPacking, fill_dummy_weights, load_weights
from worker_service.models.decoder.draft_head import DraftHead, HeadSettings
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.native import NativeModel

logger = logging.getLogger(__name__)


def build_head(
    kind: type[DraftHead],
    settings: HeadSettings,
    target: LoadedModel,
    kernels: Kernels,
    checkpoint: Checkpoint | None,
) -> DraftHead | None:
    """Build and load a head for `target`, a native model, and make `target` capture the hidden
    states that the head reads.

    Only the rank that samples has the head; the other ranks get None. kernels: of the head;
    checkpoint: with its tensors, None for dummy weights. Raises BadCheckpoint.
    """
    model = target.model
    assert isinstance(model, NativeModel), "the caller has checked it"
    model.capture(settings.captured_layers)
    if not model.communicator.layout.samples:
        return None
    context = ModelContext(
        dtype=getattr(torch, target.config.dtype),
        device=torch.device(target.config.device),
        cache_dtype=model.kv_cache_spec.dtype,
        batch_invariant=target.config.batch_invariant,
        quantization=target.config.quantization,
        packs_with_triton=model.packs_with_triton,
    )
    head = kind(settings, model, context, kernels)
    num_parameters = sum(weight.target.numel() for weight in head.weight_targets())
    packing = EagerPacking(head)
    if checkpoint is None:
        fill_dummy_weights(head.weight_targets(), on_filled=packing)
    else:
        load_weights(head, checkpoint, on_filled=packing, progress=LoadProgress())
    if copied := list(head.copied_targets()):
        _copy_from_target(copied, target, model)
    head.finish_loading()
    logger.info(
        "draft head loaded architecture=%s parameters=%d draft_vocab_size=%d layers=%s",
        settings.decoder.architecture,
        num_parameters,
        settings.draft_vocab_size,
        ",".join(map(str, settings.captured_layers)),
    )
    return head


def _copy_from_target(copied: list[WeightTarget], target: LoadedModel, model: NativeModel) -> None:
    """Read from the target's checkpoint: each rank of the target has only a shard in memory."""
    if target.config.load_format == "dummy":
        fill_dummy_weights(iter(copied))
        return
    schemes = read_schemes(target.model_dir / "config.json", target.hf_config)
    checkpoint = open_checkpoint(target.model_dir, schemes)
    sources = checkpoint.sources(model)
    for weight in copied:
        weight.target.copy_(sources[weight.name][...])
