"""A request's prompt as token ids: as it is given, tokenized, or rendered; whole or its end."""

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input.prompt import chat_tokens
from scheduler_service.frontend.served_models import ServedModel


def prompt_tokens(request: inference_pb.GenerateRequest, model: ServedModel) -> list[int]:
    """The tokens that the model is given. Tokenizing takes a while for long texts; call it off the
    loop."""
    tokens = _whole_prompt(request, model)
    params = request.sampling_params
    if not params.HasField("truncate_prompt_tokens"):
        return tokens
    return tokens[-(params.truncate_prompt_tokens or _fitting(params, model)) :]


def _whole_prompt(request: inference_pb.GenerateRequest, model: ServedModel) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "text":
        adds = not request.HasField("add_special_tokens") or request.add_special_tokens
        tokenizer = model.require_tokenizer("text prompt")
        tokens = tokenizer.encode(request.text, add_special_tokens=adds)
    else:
        tokens = chat_tokens(request.chat, model)
    if not tokens:
        field = "text" if kind == "text" else "chat.messages"
        raise InvalidArgument(field, "expected a prompt of at least one token; this one has none")
    return tokens


def _fitting(params: sampling_pb2.SamplingParams, model: ServedModel) -> int:
    """Most prompt tokens beside which the output has the room that it asks for."""
    max_model_len = model.info.max_model_len
    num_output = params.max_tokens if params.HasField("max_tokens") else 1
    if num_output >= max_model_len:
        raise InvalidArgument(
            "sampling_params.max_tokens",
            f"expected to leave room for a prompt within {max_model_len} tokens",
        )
    return max_model_len - num_output
