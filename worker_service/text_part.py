"""Names in the text model of a multimodal one: of a checkpoint's tensors, an adapter's modules."""

import re
from collections.abc import Iterable

_TEXT_MODEL = re.compile(
    r"(?:model\.)?(?:language_model|text_model)\.|thinker\.(?=model\.|lm_head\.)"
)
"""The beginning of names that says that something belongs to the text model of a multimodal one."""

_OTHER = ("visual.", "vit.", "vision_model.", "vision_encoder.", "audio_encoder.")
"""Beginnings of names in checkpoints where those of the text model have no such one."""

_TEXT_PARTS = (
    *("model.layers.", "model.embed_tokens.", "model.norm.", "model.embedding_norm.", "lm_head."),
    *("model.embed_tokens_per_layer.", "model.per_layer_", "model.altup_", "model.hc_head."),
    *("backbone.", "mtp."),
)


def text_name(name: str) -> str:
    """The name in the text model alone, such as `model.norm.weight` of
    `language_model.model.norm.weight` and `model.text_model.norm.weight`."""
    found = _TEXT_MODEL.match(name)
    if found is None:
        return name
    inner = name[found.end() :]
    return inner if inner.startswith(("model.", "backbone.", "lm_head.")) else f"model.{inner}"


def of_other_parts(names: Iterable[str], stored: Iterable[str]) -> set[str]:
    """Which names belong to other parts than the text model; none if there are no such parts.

    names: as of `text_name`; stored: the names that these were made of.
    """
    if not any(_TEXT_MODEL.match(name) or name.startswith(_OTHER) for name in stored):
        return set()
    return {name for name in names if not f"{name}.".startswith(_TEXT_PARTS)}
