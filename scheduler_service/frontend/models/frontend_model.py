"""A model as a frontend knows it: its facts, and what is read from its files."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from pagewire.v1 import model_pb2
from scheduler_service.columns import from_column
from scheduler_service.errors import UnsupportedByModel
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.chat_formats.formats import ChatFormat, find_format
from scheduler_service.frontend.models.generation_defaults import (
    GenerationDefaults,
    parse_generation_config,
)
from scheduler_service.frontend.models.tokenizer import ModelTokenizer
from scheduler_service.frontend.models.tokenizer_files import build_tokenizer

logger = logging.getLogger(__name__)

Files = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendModel:
    """A model with its tokenizer and its generation defaults."""

    info: model_pb2.ModelInfo
    tokenizer: ModelTokenizer | None
    defaults: GenerationDefaults
    why_no_tokenizer: str = "the model has no tokenizer"
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    """How reasoning and tool calls are marked in its answers."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a choice unless the request ignores them."""
        found = self.defaults.eos_token_ids.union(
            from_column(self.info.eos_token_ids, "eos_token_ids"),
            self.tokenizer.end_token_ids if self.tokenizer is not None else (),
        )
        return frozenset(token_id for token_id in found if token_id < self.info.vocab_size)

    def require_tokenizer(self, purpose: str) -> ModelTokenizer:
        """The tokenizer; raises UnsupportedByModel, which names its purpose, if there is none."""
        if self.tokenizer is None:
            raise UnsupportedByModel(
                f"{purpose}: {self.why_no_tokenizer}; token ids work", reason="NO_TOKENIZER"
            )
        return self.tokenizer

    def with_info(self, info: model_pb2.ModelInfo) -> Self:
        """The model under other facts, with the chat format that they name or that is found."""
        if self.tokenizer is None:
            return replace(self, info=info)
        try:
            found = find_format(
                self.tokenizer.template_source,
                self.tokenizer.tool_template_source,
                self.tokenizer.has_token,
                reasoning_parser=info.reasoning_parser or "auto",
                tool_call_parser=info.tool_call_parser or "auto",
            )
        except ValueError as error:  # the worker is of another version
            logger.error("chat format unknown model=%s error=%s", info.name, error)
            found = ChatFormat()
        return replace(self, info=info, chat_format=found)


def build_model(info: model_pb2.ModelInfo, files: Files) -> FrontendModel:
    """A served model from its files; unusable tokenizer files leave it without a tokenizer."""
    defaults = parse_generation_config(files.get("generation_config.json"))
    try:
        tokenizer = build_tokenizer(files, info.name)
        model = FrontendModel(info=info, tokenizer=tokenizer, defaults=defaults)
    # The files are not ours, and libraries raise exceptions of any type for malformed ones.
    except Exception as error:
        logger.error("tokenizer unusable model=%s error=%s", info.name, error)
        return FrontendModel(
            info=info,
            tokenizer=None,
            defaults=defaults,
            why_no_tokenizer=f"the model's tokenizer files cannot be used ({error})",
        )
    return model.with_info(info)


def may_use(tenant: Principal, info: model_pb2.ModelInfo) -> bool:
    """Whether a tenant may use a model, under any of its names."""
    return any(map(tenant.may_use, (info.name, *info.aliases)))


def does(info: model_pb2.ModelInfo, work: model_pb2.WorkKind.ValueType | None) -> bool:
    """Whether a model's workers do this kind of work; None: any."""
    return work is None or work in (info.work_kinds or (model_pb2.WORK_KIND_GENERATION,))


def work_name(work: model_pb2.WorkKind.ValueType) -> str:
    """The name of a kind of work, for example `generation`."""
    return model_pb2.WorkKind.Name(work).removeprefix("WORK_KIND_").lower()


def max_servable_len(info: model_pb2.ModelInfo) -> int:
    """Most tokens of a sequence: the model's length, or less if the largest KV cache holds less."""
    return min(info.max_model_len, info.max_cached_tokens or info.max_model_len)


def max_input_len(info: model_pb2.ModelInfo) -> int:
    """Most tokens of a sequence, or of a text if the model only pools and takes shorter ones."""
    pooled = () if does(info, model_pb2.WORK_KIND_GENERATION) else (info.pooling.max_text_tokens,)
    return min(filter(None, (max_servable_len(info), *pooled)))
