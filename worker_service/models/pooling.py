"""What follows the pooling of hidden states: dense layers, and the logits of labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from worker_service.distributed.layout import Shard
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.models.interface import ModelContext, Pools
from worker_service.models.linear.linear import Linear
from worker_service.plan import PoolingHead, PoolingType
from worker_service.pooling_facts import LabelActivation, PoolingFacts

_LABEL_ACTIVATIONS = {
    "Identity": LabelActivation.UNSPECIFIED,
    "Sigmoid": LabelActivation.SIGMOID,
    "Softmax": LabelActivation.SOFTMAX,
}
"""By the class name in torch."""

_TASK_ACTIVATIONS = {
    "regression": LabelActivation.UNSPECIFIED,
    "single_label_classification": LabelActivation.SOFTMAX,
    "multi_label_classification": LabelActivation.SIGMOID,
}
"""By `problem_type` in `config.json`."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda rows: rows,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": torch.relu,
    "GELU": nn.functional.gelu,
    "SiLU": nn.functional.silu,
}
"""Those of dense layers, by the class name in torch."""


POOLING_TYPE = "pooling_type"
"""The key of a `PoolingType`'s name in the configuration of a GGUF file."""


def facts_of(
    architecture: str, config: Mapping[str, Any], hidden_size: int, default: PoolingFacts
) -> PoolingFacts:
    """What a model pools according to its `config.json`.

    architecture: the class name in it; config: its content; default: how it makes vectors. A model
    for classification has labels and makes no vectors.
    """
    if architecture.endswith("ForTokenClassification"):
        return classifier_facts(config, PoolingType.ALL)
    if architecture.endswith("ForSequenceClassification"):
        return classifier_facts(config, default.classifier_type)
    kind = default.default_type
    if (stored := config.get(POOLING_TYPE)) is not None:
        names = [kind.name for kind in PoolingType]
        if stored not in names:
            expected = f"expected one of {', '.join(names)}"
            raise BadCheckpoint(f"config.json: {POOLING_TYPE}: {expected}, got {stored!r}")
        kind = PoolingType[stored]
    types = tuple(PoolingType)
    return replace(default, vector_size=hidden_size, default_type=kind, types=types)


def classifier_facts(config: Mapping[str, Any], kind: PoolingType) -> PoolingFacts:
    """The labels in `config.json`, with the defaults of `transformers`, and what turns their logits
    into probabilities: what sentence-transformers stored, or the task of the model, or a sigmoid
    for one label and softmax for several."""
    labels = labels_of(config)
    activation = LabelActivation.SIGMOID if len(labels) == 1 else LabelActivation.SOFTMAX
    activation = _TASK_ACTIVATIONS.get(str(config.get("problem_type")), activation)
    key = "sentence_transformers.activation_fn"
    settings = config.get("sentence_transformers") or {}
    if not isinstance(settings, Mapping):
        raise BadCheckpoint(
            f"config.json: sentence_transformers: expected an object, got {settings!r}"
        )
    stored = settings.get("activation_fn")
    stored = stored or config.get("sbert_ce_default_activation_function")
    if stored is not None:
        activation = label_activation(f"config.json: {key}", stored)
    return PoolingFacts(
        default_type=kind,
        types=(kind,),
        labels=labels,
        classifier_type=kind,
        label_activation=activation,
        scores_pairs=len(labels) == 1,
    )


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a classifier's labels. Raises BadCheckpoint."""
    names, count = config.get("id2label"), config.get("num_labels") or 2
    if not names:
        if type(count) is not int or count < 1:
            raise BadCheckpoint(f"config.json: num_labels: expected at least 1, got {count!r}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(names, Mapping) or not all(str(key).isdecimal() for key in names):
        raise BadCheckpoint(f"config.json: id2label: expected names by number, got {names!r}")
    return tuple(str(names[key]) for key in sorted(names, key=int))


def class_name(path: str) -> str:
    """`Tanh` of `torch.nn.modules.activation.Tanh`."""
    return path.rpartition(".")[2]


def label_activation(where: str, path: str) -> LabelActivation:
    """The activation that the path of a class of torch means. Raises UnsupportedModel, which begins
    with the file and the key in `where`."""
    found = _LABEL_ACTIVATIONS.get(class_name(str(path)))
    if found is None:
        expected = ", ".join(_LABEL_ACTIVATIONS)
        raise UnsupportedModel(f"{where}: expected one of {expected} of torch, got {path}")
    return found


def head_context(context: ModelContext) -> ModelContext:
    """The context of a layer after the pooling: of the same device, but in float32. There is one
    row for a text, so nothing is gained by computing it in fewer bits."""
    return replace(context, dtype=torch.float32, quantization=None, packs_with_triton=False)


class Dense(nn.Module):
    """A linear layer in float32, and an activation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: ModelContext,
        *,
        bias: bool = True,
        activation: str = "Identity",
    ) -> None:
        """activation: one of `ACTIVATIONS`."""
        super().__init__()
        self.out_features = out_features
        self.linear = Linear(
            Shard.full(in_features),
            [Shard.full(out_features)],
            bias=bias,
            context=head_context(context),
        )
        self._activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """rows: float32 [n, in_features]; returns float32 [n, out_features]."""
        rows, activate = self.linear(rows), ACTIVATIONS[self._activation]
        if self._activation == "Identity":
            return rows
        # Row by row: vectorized loops compute the end of a tensor in another way.
        return torch.stack([activate(row) for row in rows.unbind()])


class Pooler:
    """A model's own head, and what files next to it add; a `Pools` of any model."""

    def __init__(
        self,
        model: Pools,
        pooling: PoolingFacts,
        layers: Sequence[Dense] = (),
        classifier: Dense | None = None,
    ) -> None:
        """pooling: what the configuration and all files say together; layers: of a vector, in
        order; classifier: instead of the model's own."""
        self.pooling = pooling
        self._model = model
        self._layers = layers
        self._classifier = classifier

    @torch.inference_mode()
    def pool(self, pooled: Tensor, head: PoolingHead) -> Tensor:
        """As `Pools.pool`."""
        if head is PoolingHead.CLASSIFIER and self._classifier is not None:
            return self._classifier(pooled)
        pooled = self._model.pool(pooled, head)
        if head is PoolingHead.CLASSIFIER:
            return pooled
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled[:, : self.pooling.vector_size]
