"""`/v1/completions`: one or several prompts in a call."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from pagewire.validation import limits_of
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.openai import protocol, serving
from scheduler_service.frontend.http.openai.sampling import constraint_field, sampling_params
from scheduler_service.frontend.metrics import FINISH_LABELS
from scheduler_service.frontend.models.tokenizer import ModelTokenizer
from scheduler_service.frontend.output.detokenizer import ByteLevelDetokenizer, Detokenizer


@dataclass(slots=True)
class _Prompt:
    """The state of one prompt."""

    started: inference_pb.Started | None = None
    logprobs: Sequence[inference_pb.TokenLogprobs] = ()
    is_sent: bool = False


class CompletionResponseBuilder(serving.ChoicesBuilder):
    """Text completions. Choice i of prompt p has the index p * n + i."""

    objects = ("text_completion", "text_completion")

    def __init__(
        self,
        request: protocol.CompletionRequest,
        request_id: str,
        num_prompts: int,
        texts: "_Texts",
    ) -> None:
        self._has_output = request.max_tokens != 0
        super().__init__(
            serving.Envelope(request, f"cmpl-{request_id}", has_output=self._has_output)
        )
        self._request = request
        self._n = request.n or 1
        self._texts = texts
        self._prompts = [_Prompt() for _ in range(num_prompts)]
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = defaultdict[int, serving.LegacyLogprobs](
            lambda: serving.LegacyLogprobs(as_ids=as_ids)
        )
        self._detokenizers: dict[int, Detokenizer] = {}
        """Of the output of each choice, for its log probabilities."""

    def append(self, choice: Any, piece: Any) -> Any:
        """Append the fields of a piece."""
        return piece if choice is None else serving.joined({**choice, "index": None}, piece)

    def pieces(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterable[protocol.CompletionChoice]:
        """One piece per choice that has something new."""
        prompt = self._prompts[index]
        if response.HasField("started"):
            prompt.started = response.started
        if response.prompt_logprobs:
            prompt.logprobs = response.prompt_logprobs
        yield from self._prompt_pieces(index, prompt)
        for delta in response.choices:
            yield self._output_piece(prompt, index * self._n + delta.index, delta)

    def _prompt_pieces(self, index: int, prompt: _Prompt) -> Iterable[protocol.CompletionChoice]:
        """The requested fields of the prompt, once all of them are known."""
        request = self._request
        has_logprobs = request.prompt_logprobs is not None
        echoes_logprobs = bool(request.echo) and request.logprobs is not None
        is_asked = bool(request.echo) or has_logprobs or bool(request.return_token_ids)
        is_missing = (has_logprobs or echoes_logprobs) and not prompt.logprobs
        if not is_asked or prompt.is_sent or is_missing or prompt.started is None:
            return
        prompt.is_sent = True
        text = self._texts.of_prompt(index, prompt.started) if request.echo else ""
        for choice in range(index * self._n, (index + 1) * self._n):
            piece = self._piece(choice, text)
            if has_logprobs:
                piece["prompt_logprobs"] = serving.prompt_logprobs(prompt.logprobs)
            if request.return_token_ids:
                piece["prompt_token_ids"] = list(prompt.started.prompt_token_ids)
            if echoes_logprobs:
                detokenizer = self._texts.detokenizer(prompt.started, of_prompt=True)
                logprobs = self._logprobs[choice]
                piece["logprobs"] = logprobs.write(prompt.logprobs, detokenizer, text=text)
            yield piece

    def _output_piece(
        self, prompt: _Prompt, index: int, delta: inference_pb.ChoiceDelta
    ) -> protocol.CompletionChoice:
        if not self._has_output:  # the one token that was generated is dropped
            piece = self._piece(index)
            piece["finish_reason"] = "length" if delta.finish_reason else None
            return piece
        piece = self._piece(index)
        piece["text"] = delta.text
        piece["finish_reason"] = FINISH_LABELS.get(delta.finish_reason)
        piece["stop_reason"] = serving.stop_reason(delta)
        if self._request.logprobs is not None:
            if index not in self._detokenizers:
                self._detokenizers[index] = self._texts.detokenizer(prompt.started)
            piece["logprobs"] = self._logprobs[index].write(
                delta.logprobs, self._detokenizers[index]
            )
        if self._request.return_token_ids:
            piece["token_ids"] = list(delta.token_ids)
        return piece

    def _piece(self, index: int, text: str = "") -> protocol.CompletionChoice:
        """A piece with every key that the request's answers have; None means that nothing is
        new."""
        piece: protocol.CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._request.prompt_logprobs is not None:
            piece["prompt_logprobs"] = None
        if self._request.return_token_ids:
            piece |= {"prompt_token_ids": None, "token_ids": None}
        return piece


PromptValue = str | Sequence[int]

_BEAM_WIDTH = limits_of(sampling_pb2.BeamSearch.DESCRIPTOR)["width"]
MAX_CHOICES = 16_384
"""Maximum number of choices of all prompts of one call together."""

router = APIRouter(tags=["OpenAI"])


@serving.generation_endpoint(
    router,
    "/v1/completions",
    protocol.CompletionRequest,
    summary="Continue prompts",
    answer=ERROR_RESPONSES | serving.streamed_or_whole(protocol.Completion),
)
def answer_prompts(body: protocol.CompletionRequest, call: serving.Call) -> serving.Generation:
    """Texts or token ids as they are, one or several. With `echo` and `logprobs` the answer has
    the log probabilities of the prompts, as evaluation harnesses need them."""
    prompts = _prompts(body)
    texts = _Texts(body, prompts, call)
    builder = CompletionResponseBuilder(body, call.request_id, len(prompts), texts)
    return serving.Generation(generate_requests(body, prompts), builder, constraint_field(body))


def generate_requests(
    body: protocol.CompletionRequest, prompts: Sequence[PromptValue]
) -> list[inference_pb.GenerateRequest]:
    """The requests that a gRPC client would send, one per prompt. Raises InvalidArgument."""
    common = serving.make_request(body, completion_params(body))
    _check_room(len(prompts), common)
    requests = []
    for prompt in prompts:
        request = inference_pb.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(prompt, str):
            request.text = prompt
            if body.add_special_tokens is not None:
                request.add_special_tokens = body.add_special_tokens
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def _check_room(num_prompts: int, common: inference_pb.GenerateRequest) -> None:
    """Limit the number of prompts: the request of each repeats the common parameters, so a short
    body could take up much memory. Raises InvalidArgument."""
    params, size = common.sampling_params, max(1, common.ByteSize())
    num_choices = max(1, params.n, params.best_of, params.beam_search.width)
    most = min(protocol.MAX_PROMPTS, MAX_CHOICES // num_choices, MAX_PUBLIC_MESSAGE_BYTES // size)
    if num_prompts > max(1, most):
        raise InvalidArgument(
            "prompt",
            f"expected at most {max(1, most)} prompts, where each has {num_choices} choices and "
            f"{size} bytes of parameters",
        )


def completion_params(body: protocol.CompletionRequest) -> sampling_pb2.SamplingParams:
    """The sampling parameters. A call for nothing but the prompt's log probabilities generates one
    token, the least that the core allows, which is dropped. Raises InvalidArgument."""
    params = sampling_params(body)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidArgument("max_tokens", "expected at least 1 without echo, got 0")
    if body.max_tokens is not None and body.max_tokens >= 0:
        params.max_tokens = max(body.max_tokens, 1)
    if body.best_of is not None and body.use_beam_search:
        n, most = body.n or 1, int(_BEAM_WIDTH.high)
        if not n <= body.best_of <= most:
            expected = f"expected at least n ({n}) and at most {most} with use_beam_search"
            raise InvalidArgument("best_of", f"{expected}, got {body.best_of}")
        params.beam_search.width = body.best_of
    elif body.best_of is not None:
        params.best_of = body.best_of
    if body.logprobs is not None:
        params.logprobs = body.logprobs
        if body.echo:
            params.prompt_logprobs = max(body.logprobs, params.prompt_logprobs)
    return params


def _prompts(body: protocol.CompletionRequest) -> list[PromptValue]:
    """The prompts as a list, even if there is only one."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of a call's prompts and tokens."""

    body: protocol.CompletionRequest
    prompts: Sequence[PromptValue]
    call: serving.Call

    def of_prompt(self, index: int, started: inference_pb.Started) -> str:
        """A prompt as the client wrote it, or, if it may be truncated, the text of the tokens that
        were kept."""
        prompt = self.prompts[index]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        tokenizer = self._tokenizer(started)
        if tokenizer is None:
            return ""
        skips = self._skips_special_tokens
        return tokenizer.decode(started.prompt_token_ids, skip_special_tokens=skips)

    def detokenizer(
        self, started: inference_pb.Started | None, *, of_prompt: bool = False
    ) -> Detokenizer:
        """Reads tokens of the output, or of a prompt, as the text of the choice has them."""
        tokenizer = None if started is None else self._tokenizer(started)
        if tokenizer is None:
            return ByteLevelDetokenizer(lambda _: b"")
        is_written = of_prompt and self.body.truncate_prompt_tokens is None
        has_text = is_written and isinstance(self.prompts[0], str)
        skips = self._skips_special_tokens and not has_text
        follows = () if started is None or of_prompt else started.prompt_token_ids
        return tokenizer.detokenizer(skip_special_tokens=skips, follows=follows)

    @property
    def _skips_special_tokens(self) -> bool:
        return self.body.skip_special_tokens is not False

    def _tokenizer(self, started: inference_pb.Started) -> ModelTokenizer | None:
        return self.call.services.models.current(started.model, self.call.tenant).tokenizer
