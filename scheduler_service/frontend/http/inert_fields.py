"""Fields of requests that have no effect here, in one table: ignored, redundant or refused."""

from functools import lru_cache
from typing import Any

IGNORED = {
    "SamplingFields": (
        *("user", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    ),
    "ChatRequest": ("verbosity",),
    "ChatMessageBody": ("refusal", "annotations", "cache_control"),
    "TextPart": ("cache_control",),
    "ToolBody": ("cache_control",),
    "ToolCallBody": ("index",),
    "StreamOptions": ("include_obfuscation",),
    "JsonSchema": ("name", "description"),
    # Of /v1/responses.
    "ResponsesRequest": (
        *("include", "max_tool_calls", "stream_options", "user", "safety_identifier"),
        *("service_tier", "prompt_cache_key", "prompt_cache_retention"),
    ),
    "Item": ("id", "status", "phase", "encrypted_content"),
    "Part": ("annotations", "logprobs"),
    "Reasoning": ("summary", "generate_summary"),
    # Of /v1/messages.
    "CountTokensRequest": ("cache_control",),
    "MessagesRequest": ("metadata", "service_tier"),
    "Block": ("is_error", "signature", "caller", "cache_control"),
    "CustomTool": ("cache_control",),
    "Thinking": ("budget_tokens",),
    # Of /v1/embeddings and the like.
    "PoolingFields": ("user",),
}
"""Fields that are accepted with any value and have no effect, by the body or part that may have
them, those derived from it included."""

FIXED: dict[str, Any] = {
    "background": False,
    "detokenize": True,
    "echo": False,
    "mm_payload": "tensors",
    "modalities": ["text"],
    "return_token_offsets": False,
    "routed_experts_prompt_start": 0,
    "spaces_between_special_tokens": True,
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
    "truncation_side": "left",
}
"""The only value of fields that ask for what happens anyway, except where a body declares them."""

_NEUTRAL_FIELDS: tuple[tuple[Any, ...], ...] = (
    ("", "chat_template", "conversation", "guided_grammar", "guided_json"),
    ("", "guided_regex", "previous_response_id", "stop", "suffix"),
    ([], "allowed_token_ids", "functions", "guided_choice", "logits_processors"),
    ([], "logprob_token_ids"),
    (0, "max_tokens_per_doc", "max_tokens_per_query"),
    ("do_not_pad", "padding"),
    ({}, "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"),
    (-1, "max_completion_tokens", "seed"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for value, *names in _NEUTRAL_FIELDS for name in names},
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "function_call": ("none", "auto"),
}
"""Values that ask for nothing, by field: the field is absent, even if it is not supported."""

INSTEAD = dict.fromkeys(NEUTRAL, "leave it out") | {
    "audio": "answers are text",
    "chat_template": "the model's own template is used",
    "conversation": "send the whole conversation as input",
    "extra_body": "its entries are fields of the body itself",
    "embed_dtype": "numbers are float32",
    "endianness": "numbers are little-endian",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "images": "the models served here read text only",
    "inputs": "use texts",
    "max_chunks_per_doc": "use truncate_prompt_tokens, of query and document together",
    "max_tokens_per_doc": "use truncate_prompt_tokens, of query and document together",
    "max_tokens_per_query": "use truncate_prompt_tokens, of query and document together",
    "moderation": "leave it out",
    "padding": "no input is padded",
    "prediction": "leave it out; the model drafts by itself",
    "previous_response_id": "send the whole conversation as input",
    "web_search_options": "leave it out",
}
"""What to do instead, by field that is not supported, where no body declares it."""

_SYNONYMS = (
    ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "num_predict"),
    ("stop", "stop_sequences"),
    ("messages", "input", "prompt", "inputs"),
    ("dimensions", "output_dimension"),
    ("input_type", "prompt_name"),
    ("text_1", "queries", "data_1"),
    ("text_2", "documents", "items", "data_2"),
    ("use_activation", "normalize", "activation", "softmax"),
)
SYNONYMS = {name: group for group in _SYNONYMS for name in group}
"""The names of a field in all bodies, by any of them."""


def without_inert(kind: Any, value: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body or part of type `kind` that have an effect; null means absent."""
    ignored, declared = ignored_by(kind), kind.model_fields
    return {
        name: item
        for name, item in value.items()
        if not (item is None or name in ignored or item in NEUTRAL.get(name, ()))
        and not (name in FIXED and name not in declared and item == FIXED[name])
    }


@lru_cache
def ignored_by(kind: Any) -> frozenset[str]:
    """The fields that a body or part of this type ignores."""
    return frozenset(name for base in kind.__mro__ for name in IGNORED.get(base.__name__, ()))


def document_ignored(schema: dict[str, Any], kind: Any) -> None:
    """Add the ignored fields to the JSON schema of a body or part."""
    for name in sorted(ignored_by(kind)):
        schema.setdefault("properties", {})[name] = {"description": "Ignored."}
