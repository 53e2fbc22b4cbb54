"""Whether a model pools, and how: by its configuration, files next to it, and options."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from worker_service.config import ModelConfig
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.gguf.header import is_gguf
from worker_service.loader.files.assets import iter_assets
from worker_service.loader.files.json_files import parse_object
from worker_service.loader.files.overrides import read_template
from worker_service.loader.gguf.encoders import RERANKER
from worker_service.loader.gguf.file import open_gguf
from worker_service.loader.pooling.sentence_transformers import MODULES, DenseSettings, read_modules
from worker_service.loader.tensors import CheckpointTensor, OpenFiles, describe
from worker_service.loader.weights.checkpoint import Checkpoint
from worker_service.loader.weights.fill import fill_dummy_weights
from worker_service.models.decoder.model import DecoderModel
from worker_service.models.interface import Model, ModelContext, Pools
from worker_service.models.pooling import Dense, Pooler
from worker_service.models.registry import generates, stored_name
from worker_service.plan import PoolingType
from worker_service.pooling_facts import LabelActivation, PoolingFacts

logger = logging.getLogger(__name__)

_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ instruction or 'Given a web search query, retrieve relevant"
    " passages that answer the query' }}\n<Query>: {{ query }}\n<Document>: {{ document }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The text that Qwen3-Reranker was trained with."""

_YES = ["no", "yes"]


def pools(config: ModelConfig, hf_config: Mapping[str, Any], model_dir: Path) -> bool:
    """Whether the model is to pool. hf_config: content of `config.json`. Raises InvalidOption."""
    architecture = stored_name(hf_config)
    if config.runner == "generate" and not generates(hf_config):
        raise InvalidOption(f"runner: expected auto or pooling for {architecture}, got generate")
    if config.runner != "auto":
        return config.runner == "pooling"
    options = [name for name in ("pooler_config", "classifier_tokens") if getattr(config, name)]
    reason = ""
    if options:
        reason = f"{options[0]} is given"
    elif (model_dir / MODULES).is_file():
        reason = f"there is a {MODULES}"
    elif hf_config.get("pooling_type"):
        reason = "the file has a pooling_type"
    elif not generates(hf_config):
        reason = f"{architecture} does not generate"
    elif config.pair_template is not None:
        raise InvalidOption(
            f"pair_template: expected none, since {architecture} generates; --runner pooling, or"
            " --classifier-tokens, lets it score pairs"
        )
    if reason:
        logger.info("runner chosen runner=pooling reason=%s; --runner overrides it", reason)
    return bool(reason)


class PoolerBuilder:
    """Makes what follows the pooling in a model."""

    def __init__(
        self,
        config: ModelConfig,
        hf_config: Mapping[str, Any],
        model_dir: Path,
        checkpoint: Checkpoint,
        context: ModelContext,
    ) -> None:
        """checkpoint: empty for dummy weights."""
        self._config, self._hf_config, self._model_dir = config, hf_config, model_dir
        self._checkpoint, self._context = checkpoint, context

    def build(self, model: Model) -> Pools:
        """Raises a `WorkerError` that names the option, or the file and key at fault."""
        if not isinstance(model, Pools):
            raise UnsupportedModel(f"runner: {model.architecture} cannot pool")
        facts, layers = read_modules(self._model_dir, model.pooling)
        facts = with_pooler_config(self._with_lengths(facts), self._config.pooler_config)
        facts, classifier = self._with_classifier(facts, model)
        if self._config.pair_template is not None:
            template = read_template("pair_template", self._config.pair_template)
            if not facts.labels:
                raise InvalidOption(
                    "pair_template: expected none, since the model makes vectors, which it makes"
                    " of one text at a time"
                )
            facts = replace(facts, pair_template=template)
        if facts.max_text_tokens >= model.max_model_len:
            facts = replace(facts, max_text_tokens=0)
        if self._config.layout.pipeline_parallel_size > 1:  # whose micro-batches divide rows
            types = tuple(kind for kind in facts.types if kind is not PoolingType.ALL)
            facts = replace(facts, types=types)
        return Pooler(model, facts, [self._dense(layer) for layer in layers], classifier)

    def _with_lengths(self, facts: PoolingFacts) -> PoolingFacts:
        """With the lengths of vectors for which the model was trained (Matryoshka)."""
        lengths, key = self._hf_config.get("matryoshka_dimensions"), "matryoshka_dimensions"
        if not facts.vector_size or not (lengths or self._hf_config.get("is_matryoshka")):
            return facts
        if not lengths:
            return replace(facts, matryoshka_dimensions=(0,))
        given = lengths if isinstance(lengths, list) else [lengths]
        if not all(type(size) is int and 1 <= size <= facts.vector_size for size in given):
            raise BadCheckpoint(f"config.json: {key}: expected 1 to {facts.vector_size}: {lengths}")
        return replace(facts, matryoshka_dimensions=tuple(sorted(given)))

    def _with_classifier(
        self, facts: PoolingFacts, model: Model
    ) -> tuple[PoolingFacts, Dense | None]:
        """With the labels that tokens of the vocabulary are, and the layer of their logits."""
        tokens, key = self._hf_config.get("classifier_from_token"), "classifier_from_token"
        if tokens and not (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
            raise BadCheckpoint(f"config.json: {key}: expected a list of tokens, got {tokens!r}")
        if self._hf_config.get("is_original_qwen3_reranker"):
            tokens = tokens or _YES
        if self._config.classifier_tokens is not None:
            tokens = [token.strip() for token in self._config.classifier_tokens.split(",")]
        if not tokens:
            is_reranker = bool(self._hf_config.get(RERANKER))  # of a GGUF file
            return replace(facts, pair_template=_QWEN3_RERANKER) if is_reranker else facts, None
        if len(tokens) < 2 or not isinstance(model, DecoderModel):
            raise InvalidOption(
                "classifier_tokens: expected two or more tokens of a native decoder, got"
                f" {','.join(tokens)} of {model.architecture}"
            )
        if model.logits_soft_cap is not None:
            raise InvalidOption(
                "classifier_tokens: expected none of a model that limits its logits, which"
                f" {model.architecture} does (final_logit_softcapping: {model.logits_soft_cap})"
            )
        labels, activation, template = tuple(tokens), LabelActivation.SOFTMAX, ""
        if len(tokens) == 2:
            labels, activation = labels[1:], LabelActivation.SIGMOID
            is_reranker = tokens == _YES and self._hf_config.get("model_type") == "qwen3"
            template = _QWEN3_RERANKER if is_reranker else ""
        has_bias = "lm_head.bias" in self._checkpoint.sources(model)
        classifier = Dense(model.hidden_size, len(labels), self._context, bias=has_bias)
        targets = [*classifier.linear.targets("lm_head")]
        if self._checkpoint.files:
            for target in targets:
                target.target.copy_(self._rows_of_head(model, target.name, tokens))
        else:
            fill_dummy_weights(iter(targets))
        classifier.linear.pack()
        facts = replace(
            facts,
            vector_size=0,
            types=(PoolingType.LAST,),
            default_type=PoolingType.LAST,
            labels=labels,
            label_activation=activation,
            scores_pairs=len(labels) == 1,
            pair_template=template,
        )
        return facts, classifier

    def _rows_of_head(self, model: DecoderModel, name: str, tokens: list[str]) -> Tensor:
        """What a tensor of the LM head, its weight or its bias, has for these tokens, scaled as
        logits are; of two tokens, the difference, whose sigmoid is the softmax over both."""
        assets = dict(iter_assets(self._model_dir))
        if "tokenizer.json" not in assets:
            raise InvalidOption("classifier_tokens: expected none without a tokenizer.json")
        from tokenizers import Tokenizer  # used only here

        tokenizer = Tokenizer.from_buffer(assets["tokenizer.json"])
        ids = [tokenizer.token_to_id(token) for token in tokens]
        if None in ids:
            missing = tokens[ids.index(None)]
            raise InvalidOption(
                f"classifier_tokens: {missing!r} is no token of the vocabulary; a space before a"
                " word belongs to its token, as in 'Ġyes'"
            )
        sources = self._checkpoint.sources(model)
        head = sources.get(name) or sources[model.embedding_name]
        rows = head[...][ids].float() * model.logits_scale
        return rows[1:] - rows[:1] if len(tokens) == 2 else rows

    def _dense(self, settings: DenseSettings) -> Dense:
        """The layer with its weights. Raises BadCheckpoint."""
        layer = Dense(
            settings.in_features,
            settings.out_features,
            self._context,
            bias=settings.bias,
            activation=settings.activation,
        )
        targets, file = [*layer.linear.targets(settings.name)], settings.file
        if not self._checkpoint.files:
            fill_dummy_weights(iter(targets))
        elif not file.is_file():
            raise BadCheckpoint(f"{file} is missing; pickled weights are refused: convert them")
        else:
            stored = _tensors_of(settings)
            shapes = {weight.name: weight.source_shape for weight in targets}
            if shapes != (found := {name: tensor.shape for name, tensor in stored.items()}):
                raise BadCheckpoint(f"{file}: expected tensors {shapes}, got {found}")
            for weight in targets:
                weight.target.copy_(stored[weight.name][...])
        layer.linear.pack()
        return layer


def _tensors_of(layer: DenseSettings) -> dict[str, CheckpointTensor]:
    """The tensors of a layer by their names."""
    if not is_gguf(layer.file):
        return {tensor.name: tensor for tensor in describe(layer.file, OpenFiles())}
    tensors = open_gguf(layer.file).tensors.items()
    return {name: tensor for name, tensor in tensors if name.startswith(f"{layer.name}.")}


_TYPES = {kind.name: kind for kind in PoolingType}
_IGNORED = {"tok_pooling_type": ("ALL",)}
"""Keys of vLLM that change nothing, with the values that they may have."""


def with_pooler_config(facts: PoolingFacts, text: str | None) -> PoolingFacts:
    """The facts with the keys of `--pooler-config`. Raises InvalidOption, naming the key."""
    if text is None:
        return facts
    for key, value in parse_object("pooler_config", text).items():
        if value is not None:
            facts = _with_key(facts, key, value)
    return facts


def _with_key(facts: PoolingFacts, key: str, value: Any) -> PoolingFacts:
    if key in ("pooling_type", "seq_pooling_type"):
        if not isinstance(value, str) or value not in _TYPES:
            raise InvalidOption(f"pooler_config: {key}: expected {_named(_TYPES)}, got {value!r}")
        kind = _TYPES[value]
        if facts.labels:
            return replace(facts, classifier_type=kind, default_type=kind, types=(kind,))
        return replace(facts, default_type=kind)
    if key in ("normalize", "use_activation", "activation", "softmax"):
        if not isinstance(value, bool):
            raise InvalidOption(f"pooler_config: {key}: expected true or false, got {value!r}")
        if not facts.labels:
            return replace(facts, normalize=value)
        return facts if value else replace(facts, label_activation=LabelActivation.UNSPECIFIED)
    if key == "dimensions":
        if type(value) is not int or not 1 <= value <= facts.vector_size:
            allowed = f"1 to {facts.vector_size}"
            raise InvalidOption(f"pooler_config: dimensions: expected {allowed}, got {value!r}")
        return replace(facts, vector_size=value)
    if value in _IGNORED.get(key, ()):
        return facts
    known = "pooling_type, seq_pooling_type, tok_pooling_type (ALL), normalize, use_activation"
    raise InvalidOption(f"pooler_config: {key}: expected {known} and dimensions, got {value!r}")


def _named(names: Mapping[str, object]) -> str:
    return " or ".join(names)
