"""Bodies as the requests that a gRPC client would send.

All functions raise InvalidArgument and UnsupportedByModel.
"""

from collections.abc import Sequence
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import pooling_pb2
from scheduler_service.errors import InvalidArgument, UnsupportedByModel
from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES
from scheduler_service.frontend.http.openai.protocol import ChatPrompt
from scheduler_service.frontend.http.openai.serving_chat import chat_of
from scheduler_service.frontend.http.pooling import bodies
from scheduler_service.frontend.input.chat import chat_text, check_chat
from scheduler_service.frontend.input.validation import check_limits
from scheduler_service.frontend.models.frontend_model import FrontendModel

ALL = pooling_pb2.POOLING_TYPE_ALL

_OF_VECTORS = ("dimensions", "input_type")
_OF_CONVERSATIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_KINDS = (
    ("search_query", "query"),
    ("search_document", "document", "passage", "corpus"),
    ("classification",),
    ("clustering",),
)
"""Kinds of text, by their names in requests and among the prompts of models."""


def embed_request(
    body: bodies.EmbeddingsRequest, model: FrontendModel, *, per_token: bool = False
) -> inference_pb.EmbedRequest:
    """A request for the vectors of texts, or of their tokens."""
    return inference_pb.EmbedRequest(
        options=_options(body, model),
        embed=inference_pb.EmbedOptions(
            dimensions=body.dimensions,
            normalize=body.use_activation,
            type=_type(model, is_of_labels=False, per_token=per_token),
            prompt_name=_prompt_name(body, model),
        ),
        inputs=_inputs(body, model),
    )


def classify_request(
    body: bodies.TextFields, model: FrontendModel, *, per_token: bool = False
) -> inference_pb.ClassifyRequest:
    """A request for the labels of texts, or of their tokens."""
    _check_absent(body, _OF_VECTORS, "requires a model and a task that make vectors")
    kind = _type(model, is_of_labels=True, per_token=per_token)
    return inference_pb.ClassifyRequest(
        options=_options(body, model),
        classify=inference_pb.ClassifyOptions(apply_activation=body.use_activation, type=kind),
        inputs=_inputs(body, model),
    )


def pooling_request(
    body: bodies.PoolingBody, model: FrontendModel
) -> inference_pb.EmbedRequest | inference_pb.ClassifyRequest:
    """A request for vectors or labels, by default for what the model is made for."""
    task = body.task or ("embed" if model.info.pooling.vector_size else "classify")
    make = embed_request if task.endswith("embed") else classify_request
    return make(body, model, per_token=is_per_token(body, model))


def is_per_token(body: bodies.EmbeddingsRequest, model: FrontendModel) -> bool:
    """Whether the numbers are those of each token: as the task says, or else the model."""
    info = model.info.pooling
    if isinstance(body, bodies.PoolingBody):
        default = info.default_type if info.vector_size else info.classifier_type
        return default == ALL if body.task is None else body.task.startswith("token")
    return False


def cohere_request(body: bodies.CohereEmbedBody, model: FrontendModel) -> inference_pb.EmbedRequest:
    """A request for the vectors of texts."""
    size = body.output_dimension or model.info.pooling.vector_size
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(body.embedding_types):
        expected = f"expected no bits, of which 8 make a number: vectors have {size}"
        raise InvalidArgument("embedding_types", expected)
    side = {"START": "left", "END": "right", "NONE": None}[body.truncate]
    fields = {
        "input": body.texts,
        "dimensions": body.output_dimension,
        "input_type": body.input_type,
        "priority": body.priority,
        "truncation_side": side,
        "truncate_prompt_tokens": side and (body.max_tokens or -1),
    }
    return embed_request(bodies.EmbeddingsRequest.model_validate(fields), model)


def rank_request(body: bodies.RerankBody, model: FrontendModel) -> inference_pb.RankRequest:
    """A request for the best documents."""
    [query] = texts_of(body.query)
    return inference_pb.RankRequest(
        options=_options(body, model),
        score=_score_options(body),
        query=query,
        top_n=body.top_n or None,
        documents=texts_of(body.documents),
    )


def score_request(body: bodies.ScoreBody, model: FrontendModel) -> inference_pb.ScoreRequest:
    """A request for the scores of pairs, which has a single first text once for each."""
    firsts, seconds = texts_of(body.text_1), texts_of(body.text_2)
    if len(firsts) == 1:
        most = MAX_PUBLIC_MESSAGE_BYTES // len(seconds)
        if len(firsts[0]) > most:
            raise InvalidArgument(
                "text_1", f"expected at most {most} characters for {len(seconds)} other texts"
            )
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        expected = f"one text, or as many as text_2 has, {len(seconds)}"
        raise InvalidArgument("text_1", f"expected {expected}, got {len(firsts)}")
    pairs = zip(firsts, seconds, strict=True)
    return inference_pb.ScoreRequest(
        options=_options(body, model),
        score=_score_options(body),
        pairs=[inference_pb.TextPair(first=first, second=second) for first, second in pairs],
    )


def _score_options(body: bodies.ScoreFields) -> inference_pb.ScoreOptions:
    activation, instruction = body.use_activation, body.instruction
    return inference_pb.ScoreOptions(apply_activation=activation, instruction=instruction)


def texts_of(sides: Any) -> list[str]:
    """The texts of a field that holds one or several."""
    listed = sides if isinstance(sides, list) else [sides]
    return [side if isinstance(side, str) else side.text for side in listed]


def _options(body: bodies.PoolingFields, model: FrontendModel) -> inference_pb.PoolingOptions:
    """Special tokens are not added around a conversation, unless that is requested."""
    is_added = getattr(body, "add_special_tokens", None)
    is_chat = getattr(body, "messages", None) is not None
    side = (body.truncation_side or "unspecified").upper()
    return inference_pb.PoolingOptions(
        model=body.model or model.info.name,
        priority=body.priority,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=inference_pb.TruncationSide.Value(f"TRUNCATION_SIDE_{side}"),
        add_special_tokens=False if is_added is None and is_chat else is_added,
        cache_salt=body.cache_salt,
    )


def _type(
    model: FrontendModel, *, is_of_labels: bool, per_token: bool
) -> pooling_pb2.PoolingType.ValueType:
    """How a text is pooled: by default as the model says, if that is one result per text. Of a
    model without such results, `work` says that there are none."""
    info = model.info.pooling
    if is_of_labels and info.labels and per_token and info.classifier_type != ALL:
        expected = "expected 'classify', since the model has one result per text"
        raise InvalidArgument("task", f"{expected}, got 'token_classify'")
    default = info.classifier_type if is_of_labels else info.default_type
    has_any = info.labels if is_of_labels else info.vector_size
    if has_any and default == ALL and not per_token:
        use = "" if is_of_labels else ", and /score compares texts by them"
        raise UnsupportedByModel(
            f"the model {model.info.name!r} has a result per token of a text, not one per text: "
            f"/pooling returns them{use}",
            reason="ONE_PER_TOKEN",
        )
    return ALL if per_token else pooling_pb2.POOLING_TYPE_UNSPECIFIED


def _inputs(body: bodies.TextFields, model: FrontendModel) -> list[inference_pb.PoolingInput]:
    """Texts and token ids as they are; a conversation as the model's chat template renders it."""
    value: Any = body.input
    if (value is None) == (body.messages is None):
        raise InvalidArgument("input", "expected either input or messages")
    if value is None:
        return [inference_pb.PoolingInput(text=_rendered(body, model))]
    _check_absent(body, _OF_CONVERSATIONS, "requires messages")
    if isinstance(value, str) or isinstance(value[0], int):
        value = [value]
    if isinstance(value[0], str):
        return [inference_pb.PoolingInput(text=text) for text in value]
    prompts = (inference_pb.PromptTokens(ids=ids) for ids in value)
    return [inference_pb.PoolingInput(token_ids=prompt) for prompt in prompts]


def _rendered(body: bodies.TextFields, model: FrontendModel) -> str:
    chat = ChatPrompt.model_construct(
        messages=body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    request = inference_pb.TokenizeRequest(chat=chat_of(chat))
    check_limits(request)
    check_chat(request.chat)
    return chat_text(request.chat, model)


def _prompt_name(body: bodies.EmbeddingsRequest, model: FrontendModel) -> str | None:
    """The name of the prompt before texts: None for the model's default one, which is also for
    kinds of text that it has no prompt for; empty for none, as before conversations."""
    wanted = body.input_type
    if wanted is None:
        return None if body.messages is None else ""
    if not body.input or not isinstance(body.input[0], str):
        raise InvalidArgument("input_type", "requires texts: other inputs are used unchanged")
    names = {prompt.name for prompt in model.info.pooling.prompts}
    kind = next((kind for kind in _KINDS if wanted in kind), ())
    if not kind and wanted not in names:
        expected = ", ".join(sorted(names.union(*_KINDS)))
        raise InvalidArgument("input_type", f"expected one of {expected}, got {wanted!r}")
    return next((name for name in (wanted, *kind) if name in names), None)


def _check_absent(body: Any, names: Sequence[str], message: str) -> None:
    """Raise InvalidArgument for the first of these fields that a body has."""
    for name in names:
        if getattr(body, name, None) is not None:
            raise InvalidArgument(name, message)
