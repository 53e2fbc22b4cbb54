"""What a call wants, resolved against its model: how its inputs become texts of the core, and what
is made of their vectors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import jinja2
import numpy as np

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import pooling_pb2
from scheduler_service.errors import InvalidArgument, UnsupportedByModel
from scheduler_service.frontend.input.validation import value_or
from scheduler_service.frontend.models.chat_template import PairTemplate
from scheduler_service.frontend.models.served_models import FrontendModel, max_servable_len
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

MAX_DOCUMENTS = 100_000
"""Documents of one call of Rank, whose scores are kept until its end."""

ALL = pooling_pb2.POOLING_TYPE_ALL

_SIDES: dict[int, Side | None] = {
    inference_pb.TRUNCATION_SIDE_UNSPECIFIED: None,
    inference_pb.TRUNCATION_SIDE_LEFT: "left",
    inference_pb.TRUNCATION_SIDE_RIGHT: "right",
}
_PROMPTS = (("query",), ("document", "passage", "corpus"))
"""Names of the prompts of Rank's query and documents, as sentence-transformers looks for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a call wants."""

    model: FrontendModel
    params: pooling_pb2.PoolingParams
    encoder: InputEncoder
    inputs: Callable[[PoolingRequest, int], Sequence[tuple[Input, ...]]]
    """The texts of each input of a message, one or two, and the index of the first."""
    value_size: int
    """Numbers of a vector."""
    transform: Callable[[bytes], bytes] | None = None
    """Makes the client's numbers of vectors; None: they are the client's."""
    score: Callable[[Sequence[bytes]], float] | None = None
    """Makes a score of an input's vectors; None: the client gets vectors."""
    labels: Sequence[str] = ()

    @property
    def is_streamed(self) -> bool:
        """Whether the client gets one vector per token."""
        return self.params.type == ALL and self.score is None


def resolve_work(request: PoolingRequest, model: FrontendModel) -> Work:
    """The work of a call, by its first message, whose ranges were checked. Raises InvalidArgument
    and UnsupportedByModel for what this model cannot do."""
    match request:
        case inference_pb.EmbedRequest():
            return _embedding(request, model)
        case inference_pb.ClassifyRequest():
            return _classification(request, model)
    return _scoring(request, model)


def _embedding(request: inference_pb.EmbedRequest, model: FrontendModel) -> Work:
    info, options = model.info.pooling, request.embed
    _check_makes_vectors(model)
    params = pooling_pb2.PoolingParams(
        type=_type(options.type, info.default_type, info.types, "embed.type"),
        normalize=value_or(options, "normalize", info.normalize),
        dimensions=_dimensions(options, info),
    )
    prefix = _prompt(options, info)
    takes_ids = not (options.prompt or options.prompt_name)
    return Work(
        model=model,
        params=params,
        encoder=_encoder(request.options, model),
        inputs=partial(_inputs, prefix=prefix, takes_pairs=False, takes_ids=takes_ids),
        value_size=params.dimensions or info.vector_size,
    )


def _inputs(
    message: Any, start: int, *, prefix: str = "", takes_pairs: bool = True, takes_ids: bool = True
) -> list[tuple[Input, ...]]:
    """The inputs of Embed and Classify."""
    found: list[tuple[Input, ...]] = []
    for index, item in enumerate(message.inputs, start):
        field = f"inputs[{index}]"
        match item.WhichOneof("input"):
            case "text":
                made = Input(f"{field}.text", (item.text,), prefix=prefix)
            case "pair" if takes_pairs:
                made = Input(f"{field}.pair", (item.pair.first, item.pair.second))
            case "token_ids" if takes_ids:
                made = Input(f"{field}.token_ids", token_ids=item.token_ids.ids)
            case kind:
                others = " or token_ids" * takes_ids + " or a pair" * takes_pairs
                hint = ", without a prompt" if kind == "token_ids" else ""
                expected = f"expected a text{others}, got {kind or 'none'}{hint}"
                made = Input(field, error=InvalidArgument(field, expected))
        found.append((made,))
    return found


def _classification(request: inference_pb.ClassifyRequest, model: FrontendModel) -> Work:
    info, options = model.info.pooling, request.classify
    if not info.labels:
        raise UnsupportedByModel(
            f"the model {model.info.name!r} has no labels: it makes vectors, for Embed",
            reason="NO_LABELS",
        )
    of_model = info.classifier_type
    params = pooling_pb2.PoolingParams(
        type=_type(options.type, of_model, (of_model,), "classify.type"),
        head=pooling_pb2.POOLING_HEAD_CLASSIFIER,
    )
    applies = value_or(options, "apply_activation", True)
    return Work(
        model=model,
        params=params,
        encoder=_encoder(request.options, model),
        inputs=_inputs,
        value_size=len(info.labels),
        transform=partial(activated, info.label_activation, len(info.labels)) if applies else None,
        labels=info.labels,
    )


def _scoring(
    request: inference_pb.ScoreRequest | inference_pb.RankRequest, model: FrontendModel
) -> Work:
    """The score of pairs by a model that reads them together, or by the similarity of vectors."""
    if isinstance(request, inference_pb.RankRequest) and not request.query:
        raise InvalidArgument("query", "expected a text that is not empty")
    is_joint = model.info.pooling.scores_pairs
    return (_joint_scoring if is_joint else _comparison)(request, model)


_ScoringRequest: TypeAlias = inference_pb.ScoreRequest | inference_pb.RankRequest


def _pairs(
    message: _ScoringRequest, start: int, query: str
) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
    """The field of each pair, its texts and their fields."""
    if isinstance(message, inference_pb.RankRequest):
        for index, document in enumerate(message.documents, start):
            field = f"documents[{index}]"
            yield field, (query, document), ("query", field)
    else:
        for index, pair in enumerate(message.pairs, start):
            field = f"pairs[{index}]"
            yield field, (pair.first, pair.second), (f"{field}.first", f"{field}.second")


def _query(request: _ScoringRequest) -> str:
    return request.query if isinstance(request, inference_pb.RankRequest) else ""


def _joint_scoring(request: _ScoringRequest, model: FrontendModel) -> Work:
    info, options = model.info.pooling, request.score
    if len(info.labels) != 1:
        raise UnsupportedByModel(
            f"the model {model.info.name!r} gives a pair {len(info.labels)} labels, not a score; "
            "Classify returns them",
            reason="NO_SCORES",
        )
    template = _template(info.pair_template) if info.pair_template else None
    instruction = value_or(options, "instruction", None)
    if instruction is not None and (template is None or not template.has_instruction):
        raise InvalidArgument("score.instruction", "expected none: the model has no place for it")
    activation = info.label_activation
    if not value_or(options, "apply_activation", True):
        activation = pooling_pb2.LABEL_ACTIVATION_UNSPECIFIED
    query = _query(request)

    def inputs(message: Any, start: int) -> list[tuple[Input, ...]]:
        return [(Input(field, texts),) for field, texts, _ in _pairs(message, start, query)]

    return Work(
        model=model,
        params=pooling_pb2.PoolingParams(
            type=info.classifier_type, head=pooling_pb2.POOLING_HEAD_CLASSIFIER
        ),
        encoder=_encoder(request.options, model, template, instruction),
        inputs=inputs,
        value_size=1,
        score=lambda values: float(np.frombuffer(activated(activation, 1, values[0]), "<f4")[0]),
    )


def _comparison(request: _ScoringRequest, model: FrontendModel) -> Work:
    info, options = model.info.pooling, request.score
    _check_makes_vectors(model)
    for name in ("apply_activation", "instruction"):
        if options.HasField(name):
            expected = "expected none: the model makes vectors, whose similarity is the score"
            raise InvalidArgument(f"score.{name}", expected)
    is_late = info.similarity == pooling_pb2.SIMILARITY_MAX_SIM
    query = _query(request)
    kinds = _PROMPTS if isinstance(request, inference_pb.RankRequest) else ((), ())
    prefixes = [_prompt_of_kind(info, names) for names in kinds]

    def inputs(message: Any, start: int) -> list[tuple[Input, ...]]:
        return [
            tuple(
                Input(field, (text,), prefix=prefix)
                for field, text, prefix in zip(fields, texts, prefixes, strict=True)
            )
            for _, texts, fields in _pairs(message, start, query)
        ]

    return Work(
        model=model,
        params=pooling_pb2.PoolingParams(
            type=ALL if is_late else info.default_type, normalize=info.normalize
        ),
        encoder=_encoder(request.options, model),
        inputs=inputs,
        value_size=info.vector_size,
        score=lambda values: similarity(info.similarity, info.vector_size, *values),
    )


def _check_makes_vectors(model: FrontendModel) -> None:
    if not model.info.pooling.vector_size:
        raise UnsupportedByModel(
            f"the model {model.info.name!r} makes no vectors: it has labels, for Classify",
            reason="NO_VECTORS",
        )


def _type(
    requested: pooling_pb2.PoolingType.ValueType,
    default: pooling_pb2.PoolingType.ValueType,
    allowed: Iterable[pooling_pb2.PoolingType.ValueType],
    field: str,
) -> pooling_pb2.PoolingType.ValueType:
    if requested == pooling_pb2.POOLING_TYPE_UNSPECIFIED:
        return default
    if requested not in (allowed := sorted({default, *allowed})):
        names = pooling_pb2.PoolingType.values(), pooling_pb2.PoolingType.keys()
        found = dict(zip(*names, strict=True))
        known = " and ".join(found[kind] for kind in allowed)
        got = found.get(requested, requested)
        raise InvalidArgument(field, f"expected {known}, which the model has, got {got}")
    return requested


def _dimensions(options: inference_pb.EmbedOptions, info: pooling_pb2.PoolingInfo) -> int:
    """Numbers of a vector; 0: all."""
    size, requested = info.vector_size, options.dimensions
    if not options.HasField("dimensions") or requested == size:
        return 0
    allowed = sorted(info.matryoshka_dimensions)
    if not allowed:
        expected = f"{size}: the model was not trained for shorter vectors (Matryoshka)"
    elif allowed == [0]:
        expected = f"1 to {size}"
    else:
        expected = f"one of {', '.join(map(str, sorted({*allowed, size})))}"
    if requested in allowed or (allowed == [0] and requested < size):
        return requested
    raise InvalidArgument("embed.dimensions", f"expected {expected}, got {requested}")


def _prompt(options: inference_pb.EmbedOptions, info: pooling_pb2.PoolingInfo) -> str:
    """The text that precedes the texts of Embed."""
    if options.HasField("prompt"):
        if options.HasField("prompt_name"):
            raise InvalidArgument("embed.prompt", "excludes prompt_name: give one of them")
        return options.prompt
    if not options.HasField("prompt_name"):
        return _prompt_of_kind(info, ())
    prompts = {prompt.name: prompt.text for prompt in info.prompts} | {"": ""}
    if options.prompt_name not in prompts:
        names = ", ".join(sorted(filter(None, prompts))) or "none"
        got = f"got {options.prompt_name!r}"
        raise InvalidArgument("embed.prompt_name", f"expected one of the model's: {names}; {got}")
    return prompts[options.prompt_name]


def _prompt_of_kind(info: pooling_pb2.PoolingInfo, names: Iterable[str]) -> str:
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
    limit = max_tokens = max_servable_len(model.info)
    if model.info.pooling.max_text_tokens:
        limit = max_tokens = min(limit, model.info.pooling.max_text_tokens)
    if options.HasField("truncate_prompt_tokens") and options.truncate_prompt_tokens != -1:
        max_tokens = options.truncate_prompt_tokens
    if not 1 <= max_tokens <= limit:
        expected = f"expected -1, or 1 to the model's {limit}, got {max_tokens}"
        raise InvalidArgument("options.truncate_prompt_tokens", expected)
    if options.truncation_side not in _SIDES:
        expected = f"expected 0 to 2 (TruncationSide), got {options.truncation_side}"
        raise InvalidArgument("options.truncation_side", expected)
    return InputEncoder(
        model=model,
        max_tokens=max_tokens,
        truncates=options.HasField("truncate_prompt_tokens"),
        side=_SIDES[options.truncation_side],
        # A template writes its special tokens itself.
        adds_special_tokens=value_or(options, "add_special_tokens", template is None),
        template=template,
        instruction=instruction,
    )
