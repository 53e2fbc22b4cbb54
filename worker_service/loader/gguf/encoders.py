"""The configuration of encoders, and of pooling, as `transformers` would describe it."""

from collections.abc import Mapping
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.loader.gguf.attention import layer_types
from worker_service.loader.gguf.metadata import Metadata
from worker_service.loader.gguf.rope import with_local_rope

_POOLINGS = ("ALL", "MEAN", "CLS", "LAST")
"""Names of `PoolingType` by `pooling_type`; the next number is that of a classifier."""

_CLASSIFIERS = {
    "bert": ("RobertaForSequenceClassification", ("cls", "cls.output")),
    "modernbert": ("ModernBertForSequenceClassification", ("cls", "cls.norm", "cls.output")),
    "qwen3": ("Qwen3ForSequenceClassification", ("cls.output",)),
}
"""Class and tensors of classifiers by `model_type`. Of others, files lack a layer: the pooler."""

_OF_RERANKER = ["yes", "no"]
"""Labels of Qwen3-Reranker: rows of its LM head."""

RERANKER = "is_qwen3_reranker"
"""The key of whether a file is that of a Qwen3-Reranker, whose label is the first of the two: the
sigmoid of the difference of their logits is its probability."""


DENSE_LAYERS = ("dense_2", "dense_3")
"""Names of the layers that follow the pooling, in order, by those of sentence-transformers; with
one size of features in the metadata for their rows, and one for their columns."""


def encoder(meta: Metadata, config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """The fields that only encoders have."""
    types, kind = meta.tensors.get("token_types.weight"), config["model_type"]
    epsilon = meta.real("attention.layer_norm_epsilon")
    fields = {
        "layer_norm_eps": epsilon,
        "norm_eps": epsilon,
        "hidden_act": meta.get("hidden_act", "silu" if kind == "nomic_bert" else "gelu"),
        "type_vocab_size": 0 if types is None else types.shape[0],
    }
    if kind == "modernbert":
        fields |= {
            "local_attention": window or 0,
            "layer_types": layer_types(meta, config["num_hidden_layers"], window),
            "rope_parameters": with_local_rope(
                config["rope_parameters"], meta.real("rope.freq_base_swa", 10000.0)
            ),
        }
    return fields


def pooling(meta: Metadata, kind: str) -> dict[str, Any]:
    """What the file says of pooling, if anything: how vectors are made, or a classifier."""
    number, tensors = meta.get("pooling_type", -1), meta.tensors
    _check_dense_layers(meta)
    if number == -1:
        return {}
    if number in range(len(_POOLINGS)):
        return {"pooling_type": _POOLINGS[number]}
    name, parts = _CLASSIFIERS.get(kind, ("", ("",)))
    if number != len(_POOLINGS) or not all(f"{part}.weight" in tensors for part in parts):
        expected = "0 to 3: none, mean, cls, last"
        if kind in _CLASSIFIERS:
            expected += f"; or 4, a classifier, with tensors {', '.join(parts)}"
        raise meta.fault("pooling_type", expected, number, UnsupportedModel)
    count = tensors["cls.output.weight"].shape[0]
    labels = meta.get("classifier.output_labels", [f"LABEL_{i}" for i in range(count)])
    if not isinstance(labels, list) or len(labels) != count:
        raise meta.fault("classifier.output_labels", f"{count} labels", labels)
    if kind == "qwen3":
        is_reranker = labels == _OF_RERANKER
        labels = labels[:1] if is_reranker else labels
        fields: dict[str, Any] = {RERANKER: is_reranker}
    else:
        fields = {
            "classifier_bias": "cls.bias" in tensors,
            "pad_token_id": -1,  # the first row of positions is that of the first token
        }
    names = {str(index): label for index, label in enumerate(labels)}
    return {"architectures": [name], "id2label": names, **fields}


def _check_dense_layers(meta: Metadata) -> None:
    """Raise BadCheckpoint if a layer after the pooling is missing or has another shape than the
    metadata say."""
    for name in DENSE_LAYERS:
        tensor = meta.tensors.get(f"{name}.weight")
        shape = [0, 0] if tensor is None else tensor.shape
        for axis, key in enumerate((f"{name}_feat_out", f"{name}_feat_in")):
            if (size := meta.get(key, shape[axis])) != shape[axis]:
                raise meta.fault(key, f"{shape[axis]}, by the shape of {name}.weight", size)
