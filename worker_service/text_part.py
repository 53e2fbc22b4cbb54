"""Names in the text model of a multimodal one: of a checkpoint's tensors, an adapter's modules."""

from collections.abc import Iterable

TEXT_MODEL = "language_model."
"""The part of names that says that something belongs to the text model of a multimodal one."""

_TEXT_PARTS = (
    *("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."),
    *("model.embed_tokens_per_layer.", "model.per_layer_", "model.altup_", "mtp."),
)


def text_name(name: str) -> str:
    """The name in the text model alone, such as `model.norm.weight` of
    `language_model.model.norm.weight` and `model.language_model.norm.weight`."""
    outer, found, inner = name.partition(TEXT_MODEL)
    if not found or outer not in ("", "model."):
        return name
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def of_other_parts(names: Iterable[str], stored: Iterable[str]) -> set[str]:
    """Which names belong to other parts than the text model; none if there are no such parts.

    names: as of `text_name`; stored: the names that these were made of.
    """
    if not any(TEXT_MODEL in name for name in stored):
        return set()
    return {name for name in names if not f"{name}.".startswith(_TEXT_PARTS)}
