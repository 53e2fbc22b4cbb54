"""What a call wants, resolved against its model: how its inputs become texts of the core, and what
is made of their vectors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import jinja2
import numpy as np

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import pooling_pb2
from scheduler_service.errors import InvalidArgument, UnsupportedByModel
from scheduler_service.frontend.input.validation import value_or
from scheduler_service.frontend.models.chat_template import PairTemplate
from scheduler_service.frontend.models.frontend_model import FrontendModel, max_servable_len
from scheduler_service.frontend.models.tokenizer import Side
from scheduler_service.frontend.pooling.inputs import Input, InputEncoder
from scheduler_service.frontend.pooling.scores import activated, similarity

PoolingRequest: TypeAlias = (
    inference_pb.EmbedRequest
    | inference_pb.ScoreRequest
    | inference_pb.RankRequest
    | inference_pb.ClassifyRequest
)
"""The message of a call; the first one has its options."""

INPUTS = {"EmbedRequest": "inputs", "ScoreRequest": "pairs", "RankRequest": "documents"} | {
    "ClassifyRequest": "inputs"
}
"""The field of a message's inputs."""

ALL = pooling_pb2.POOLING_TYPE_ALL
_Type: TypeAlias = pooling_pb2.PoolingType.ValueType

_SIDES: dict[int, Side | None] = {
    inference_pb.TRUNCATION_SIDE_UNSPECIFIED: None,
    inference_pb.TRUNCATION_SIDE_LEFT: "left",
    inference_pb.TRUNCATION_SIDE_RIGHT: "right",
}
_RANK_PROMPTS = (("query",), ("document", "passage", "corpus"))
"""Names of the prompts of a query and of documents, as sentence-transformers looks for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a call wants."""

    model: FrontendModel
    params: pooling_pb2.PoolingParams
    encoder: InputEncoder
    value_size: int
    """Numbers of a vector: of hidden states, or of labels."""
    is_scored: bool
    """Whether the client gets scores of pairs, and no vectors."""
    prefixes: Sequence[str] = ("",)
    """What precedes the text of an input; two, if the texts of a pair get a vector each."""
    query: str = ""
    """The first text of all pairs of a call of Rank."""
    takes_ids: bool = True
    activation: pooling_pb2.LabelActivation.ValueType = pooling_pb2.LABEL_ACTIVATION_UNSPECIFIED
    """Of labels."""
    labels: Sequence[str] = ()

    @property
    def is_streamed(self) -> bool:
        """Whether the client gets one vector per token."""
        return self.params.type == ALL and not self.is_scored

    def transform(self, values: bytes) -> bytes:
        """The client's numbers of the worker's."""
        return activated(self.activation, self.value_size, values)

    def score(self, vectors: Sequence[bytes]) -> float:
        """The score of a pair, by the one label that it has, or by the vectors of its texts."""
        if self.labels:
            return float(np.frombuffer(self.transform(vectors[0]), "<f4")[0])
        return similarity(self.model.info.pooling.similarity, self.value_size, *vectors)

    def inputs(self, message: Any, start: int) -> Iterator[tuple[Input, ...]]:
        """The texts of each input of a message, whose first one has this index in the call: two, if
        they get a vector each."""
        name = INPUTS[type(message).__name__]
        for index, item in enumerate(getattr(message, name), start):
            field = f"{name}[{index}]"
            if isinstance(item, inference_pb.PoolingInput):
                yield (self._input(item, field),)
                continue
            if isinstance(item, str):
                texts, fields = (self.query, item), ("query", field)
            else:
                texts, fields = (item.first, item.second), (f"{field}.first", f"{field}.second")
            if len(self.prefixes) == 1:
                yield (Input(field, texts, fields),)
            else:
                parts = zip(texts, fields, self.prefixes, strict=True)
                yield tuple(Input(field, (text,), (field,), (), p) for text, field, p in parts)

    def _input(self, item: inference_pb.PoolingInput, field: str) -> Input:
        """An input of Embed or Classify."""
        takes_pairs = bool(self.labels)
        match kind := item.WhichOneof("input"):
            case "text":
                field = f"{field}.text"
                return Input(field, (item.text,), (field,), (), self.prefixes[0])
            case "pair" if takes_pairs:
                texts = item.pair.first, item.pair.second
                return Input(
                    f"{field}.pair", texts, (f"{field}.pair.first", f"{field}.pair.second")
                )
            case "token_ids" if self.takes_ids:
                return Input(f"{field}.token_ids", token_ids=item.token_ids.ids)
        others = " or token_ids" * self.takes_ids + " or a pair" * takes_pairs
        hint = ", without a prompt" if kind == "token_ids" else ""
        expected = f"expected a text{others}, got {kind or 'none'}{hint}"
        return Input(field, error=InvalidArgument(field, expected))


def resolve_work(request: Any, model: FrontendModel) -> Work:
    """The work of a call, by its first message, whose ranges were checked. Raises InvalidArgument
    and UnsupportedByModel for what this model cannot do."""
    info = model.info.pooling
    is_scored = isinstance(request, inference_pb.ScoreRequest | inference_pb.RankRequest)
    is_rank = isinstance(request, inference_pb.RankRequest)
    if is_rank and not request.query:
        raise InvalidArgument("query", "expected a text that is not empty")
    query = request.query if is_rank else ""
    if isinstance(request, inference_pb.ClassifyRequest) or (is_scored and info.scores_pairs):
        return _by_labels(request, model, query, is_scored=is_scored)
    if not info.vector_size:
        raise _unsupported(
            model, "makes no vectors, only labels, which Classify, /classify and /pooling return"
        )
    embed = inference_pb.EmbedOptions() if is_scored else request.embed
    for name in ("apply_activation", "instruction"):
        if is_scored and request.score.HasField(name):
            expected = "expected none: the model makes vectors, whose similarity is the score"
            raise InvalidArgument(f"score.{name}", expected)
    is_late = is_scored and info.similarity == pooling_pb2.SIMILARITY_MAX_SIM
    kinds = _RANK_PROMPTS if is_rank else ((), ())
    params = pooling_pb2.PoolingParams(
        type=_type(embed.type, ALL if is_late else info.default_type, info.types, "embed.type"),
        normalize=value_or(embed, "normalize", info.normalize),
        dimensions=_dimensions(embed, info),
    )
    return Work(
        model=model,
        params=params,
        encoder=_encoder(request.options, model),
        value_size=params.dimensions or info.vector_size,
        is_scored=is_scored,
        prefixes=[_of_kind(info, k) for k in kinds] if is_scored else [_prompt(embed, info)],
        query=query,
        takes_ids=not (embed.prompt or embed.prompt_name),
    )


def _by_labels(request: Any, model: FrontendModel, query: str, *, is_scored: bool) -> Work:
    """The labels of texts and pairs, or the one of pairs that is their score."""
    info = model.info.pooling
    options = request.score if is_scored else request.classify
    if not info.labels:
        raise _unsupported(
            model, "has no labels, only vectors, which Embed and /v1/embeddings return"
        )
    if is_scored and len(info.labels) != 1:
        raise _unsupported(model, f"gives a pair {len(info.labels)} labels: Classify returns them")
    requested = pooling_pb2.POOLING_TYPE_UNSPECIFIED if is_scored else options.type
    template = _template(info.pair_template) if info.pair_template else None
    instruction = value_or(options, "instruction", None) if is_scored else None
    if instruction is not None and (template is None or not template.has_instruction):
        raise InvalidArgument("score.instruction", "expected none: the model has no place for it")
    activation = info.label_activation
    if not value_or(options, "apply_activation", True):
        activation = pooling_pb2.LABEL_ACTIVATION_UNSPECIFIED
    return Work(
        model=model,
        params=pooling_pb2.PoolingParams(
            type=_type(requested, info.classifier_type, (), "classify.type"),
            head=pooling_pb2.POOLING_HEAD_CLASSIFIER,
        ),
        encoder=_encoder(request.options, model, template, instruction),
        value_size=len(info.labels),
        is_scored=is_scored,
        query=query,
        activation=activation,
        labels=info.labels,
    )


def _unsupported(model: FrontendModel, problem: str) -> UnsupportedByModel:
    return UnsupportedByModel(
        f"the model {model.info.name!r} {problem}", reason="POOLING_UNSUPPORTED"
    )


def _type(requested: _Type, default: _Type, others: Iterable[_Type], field: str) -> _Type:
    """The type of pooling in effect; `others` are allowed besides the default one."""
    allowed = sorted({default, *others})
    if requested and requested not in allowed:
        names = {number: name for name, number in pooling_pb2.PoolingType.items()}
        has = " and ".join(names.get(number, str(number)) for number in allowed)
        got = names.get(requested, requested)
        raise InvalidArgument(field, f"expected {has}, which the model has, got {got}")
    return requested or default


def _dimensions(options: inference_pb.EmbedOptions, info: pooling_pb2.PoolingInfo) -> int:
    """Numbers of a vector; 0: all."""
    size, requested = info.vector_size, options.dimensions
    if not options.HasField("dimensions") or requested == size:
        return 0
    allowed = info.matryoshka_dimensions
    if requested in allowed or (list(allowed) == [0] and requested < size):
        return requested
    expected = f"{size}: the model was not trained for shorter vectors (Matryoshka)"
    if allowed:
        sizes = ", ".join(map(str, sorted({*allowed, size})))
        expected = f"1 to {size}" if list(allowed) == [0] else f"one of {sizes}"
    raise InvalidArgument("embed.dimensions", f"expected {expected}, got {requested}")


def _prompt(options: inference_pb.EmbedOptions, info: pooling_pb2.PoolingInfo) -> str:
    """The text that precedes the texts of Embed."""
    if options.HasField("prompt"):
        if options.HasField("prompt_name"):
            raise InvalidArgument("embed.prompt", "excludes prompt_name: give one of them")
        return options.prompt
    if not options.HasField("prompt_name"):
        return _of_kind(info, ())
    prompts = {prompt.name: prompt.text for prompt in info.prompts} | {"": ""}
    if options.prompt_name not in prompts:
        names = ", ".join(sorted(filter(None, prompts))) or "none"
        expected = f"expected one of the model's prompts ({names}), got {options.prompt_name!r}"
        raise InvalidArgument("embed.prompt_name", expected)
    return prompts[options.prompt_name]


def _of_kind(info: pooling_pb2.PoolingInfo, names: Iterable[str]) -> str:
    """The first of the model's prompts with these names, or else its default prompt."""
    prompts = {prompt.name: prompt.text for prompt in info.prompts}
    return next((prompts[n] for n in (*names, info.default_prompt_name) if n in prompts), "")


@lru_cache(maxsize=64)
def _template(source: str) -> PairTemplate:
    try:
        return PairTemplate(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedByModel(
            f"the model's template of pairs cannot be used: line {error.lineno}: {error.message}",
            reason="NO_PAIR_TEMPLATE",
        ) from error


def _encoder(
    options: inference_pb.PoolingOptions,
    model: FrontendModel,
    template: PairTemplate | None = None,
    instruction: str | None = None,
) -> InputEncoder:
    limit = max_servable_len(model.info)
    limit = min(limit, model.info.pooling.max_text_tokens or limit)
    truncates = options.HasField("truncate_prompt_tokens")
    is_given = truncates and options.truncate_prompt_tokens != -1
    max_tokens = options.truncate_prompt_tokens if is_given else limit
    if not 1 <= max_tokens <= limit:
        expected = f"expected -1, or 1 to the model's {limit}, got {max_tokens}"
        raise InvalidArgument("options.truncate_prompt_tokens", expected)
    if options.truncation_side not in _SIDES:
        expected = f"expected 0 to 2 (TruncationSide), got {options.truncation_side}"
        raise InvalidArgument("options.truncation_side", expected)
    return InputEncoder(
        model=model,
        max_tokens=max_tokens,
        truncates=truncates,
        side=_SIDES[options.truncation_side],
        # A template writes its special tokens itself.
        adds_special_tokens=value_or(options, "add_special_tokens", template is None),
        template=template,
        instruction=instruction,
    )
