"""Loading an EAGLE-3 draft head, which is checked against its target model.

Checkpoints come in three layouts of the same tensors: that of the authors and of SGLang, that of
vLLM, and that of the `speculators` library, which has the layer's configuration in
`transformer_layer_config`. The target's layers whose hidden states are fused are listed in one of
two fields: ids in `eagle_config` refer to the outputs of layers, ids at the top level to inputs.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker_service.config import CacheConfig
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel, WorkerError
from worker_service.loader.drafts.draft_head import build_head
from worker_service.loader.files.config import read_config
from worker_service.loader.files.places import resolve_model
from worker_service.loader.kernels import choose_kernels
from worker_service.loader.loaded_model import LoadedModel
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import Checkpoint, open_checkpoint
from worker_service.models.decoder.draft_head import DraftHead, EagleHead, HeadSettings
from worker_service.models.decoder.specs import DraftHeadSpec
from worker_service.models.decoder_families.common import NotNative
from worker_service.models.decoder_families.llama import llama_settings
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.native import NativeModel
from worker_service.models.registry import NATIVE_MODELS

_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
_NAMES = {"fusion": "fc", "hidden_norm": "midlayer.hidden_norm", "norm": "norm"}
_OTHER_HEADS = re.compile(r"MTP|NextN|Medusa|Eagle|MLPSpeculator", re.IGNORECASE)


def load_eagle_head(name: str, target: LoadedModel, cache: CacheConfig) -> DraftHead | None:
    """Load the head that drafts tokens for `target`, and make `target` capture its hidden states.

    Only the rank that samples has the head. The other ranks get None: they read its settings, and
    send their captured hidden states to that rank. name: of the head's checkpoint, as for
    `resolve_model`; cache: options of the target's KV cache. Raises a `WorkerError` that names
    `speculative_model`, also if the head was trained for another model.
    """
    try:
        return _load(name, target, cache)
    except WorkerError as error:
        raise type(error)(f"speculative_model: {error}") from error


def _load(name: str, target: LoadedModel, cache: CacheConfig) -> DraftHead | None:
    model = target.model
    if not isinstance(model, NativeModel):
        raise UnsupportedModel(
            f"heads of EAGLE-3 need a target among {', '.join(NATIVE_MODELS)}, got"
            f" {model.architecture}, which runs through transformers"
        )
    model_dir = resolve_model(name)
    config = _layer_config(read_config(model_dir), model_dir)
    schemes = read_schemes(model_dir / "config.json", config)
    checkpoint = open_checkpoint(model_dir, schemes)
    settings = _settings(config, checkpoint, model)
    dtype, device = getattr(torch, target.config.dtype), torch.device(target.config.device)
    cache = replace(cache, block_size=target.block_size)
    kernels = choose_kernels(target.config, cache, config, dtype, device)
    head = build_head(EagleHead, settings, target, kernels, checkpoint)
    if head is not None:
        head.use_draft_vocabulary(_draft_tokens(checkpoint, settings))
    return head


def _layer_config(config: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """The configuration in the authors' layout. Raises InvalidOption, naming the architecture, if
    it is not that of an EAGLE-3 head."""
    architecture = config["architectures"][0]
    is_authors = architecture == "LlamaForCausalLM" and config.get("draft_vocab_size") is not None
    if architecture not in _ARCHITECTURES and not is_authors:
        kind = "another kind of head" if _OTHER_HEADS.search(architecture) else "a whole model"
        raise InvalidOption(
            f"expected a head of EAGLE-3 ({', '.join(_ARCHITECTURES)}), got {architecture} in"
            f" {model_dir}: {kind}"
        )
    return {**config, **config.get("transformer_layer_config", {}), "architectures": [architecture]}


def _settings(
    config: Mapping[str, Any], checkpoint: Checkpoint, target: NativeModel
) -> HeadSettings:
    try:
        decoder = llama_settings({**config, "architectures": ["LlamaForCausalLM"]})
    except KeyError as error:
        raise BadCheckpoint(f"config.json: a head of EAGLE-3 needs the key {error}") from error
    except NotNative:
        decoder = None
    if decoder is None or not decoder.activations <= ACTIVATIONS.keys():
        raise UnsupportedModel(
            "config.json: expected an activation and rotary embeddings that Llama models have"
        )
    fused_size = config.get("target_hidden_size") or decoder.hidden_size
    for field, got, wanted in (
        ("num_hidden_layers", decoder.num_layers, 1),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
        ("target_hidden_size", fused_size, target.hidden_size),
    ):
        if got != wanted:
            raise InvalidOption(
                f"{field}: expected {wanted}, as {target.architecture} needs it, got {got}"
            )
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    draft_vocab_size = config.get("draft_vocab_size") or decoder.vocab_size
    has_embedding, has_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    if not has_embedding and decoder.hidden_size != target.hidden_size:
        raise BadCheckpoint(
            "embed_tokens.weight is missing, and the target's embedding has"
            f" {target.hidden_size} columns, not {decoder.hidden_size}"
        )
    shape = draft_vocab_size, decoder.hidden_size
    if not has_head and shape != (target.vocab_size, target.hidden_size):
        raise BadCheckpoint("lm_head.weight is missing, and the target's has another shape")
    [layer] = decoder.layers
    spec = DraftHeadSpec(
        layer=layer,
        layer_name="midlayer",
        names=_NAMES,
        tensor_names=".*",
        embedding_name="embed_tokens.weight",
        head_name="lm_head.weight",
        norms_residual=bool(config.get("norm_before_residual", False)),
    )
    return HeadSettings(
        spec=spec,
        decoder=replace(decoder, architecture=config["architectures"][0]),
        draft_vocab_size=draft_vocab_size,
        captured_layers=_captured_layers(config, target.num_layers),
        has_embedding=has_embedding,
        has_head=has_head,
    )


def _captured_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs are fused."""
    field = "eagle_aux_hidden_state_layer_ids"
    layers = [2, num_layers // 2, num_layers - 3]
    if inner := (config.get("eagle_config") or {}).get(field):
        layers = [layer + 1 for layer in inner]
    layers = config.get(field) or layers
    if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers):
        raise InvalidOption(
            f"{field}: expected layers whose outputs enter one of the target's {num_layers}"
            f" layers, got {config.get(field) or inner or f'none, which means {layers}'}"
        )
    return tuple(layers)


def _draft_tokens(checkpoint: Checkpoint, settings: HeadSettings) -> Tensor:
    """The target's token id of each draft logit: int64 [draft_vocab_size]. `d2t` holds the
    difference between the two ids."""
    size, vocab_size = settings.draft_vocab_size, settings.decoder.vocab_size
    tokens = torch.arange(size)
    stored = checkpoint.tensors
    if "d2t" in stored:
        offsets = stored["d2t"][...]
        if offsets.shape != (size,):
            raise BadCheckpoint(f"d2t: expected {size} numbers, one per draft_vocab_size")
        tokens = tokens + offsets.long()
    elif size != vocab_size:
        raise BadCheckpoint(
            f"d2t is missing, but the head drafts only {size} of {vocab_size} tokens"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(tokens.unique()) < size:
        raise BadCheckpoint(f"d2t: expected {size} distinct tokens below {vocab_size}")
    if "t2d" in stored:
        is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
        is_drafted[tokens] = True
        if not torch.equal(stored["t2d"][...].bool(), is_drafted):
            raise BadCheckpoint("t2d: expected true exactly for the tokens of d2t")
    return tokens
