"""Offline inference: a model without a server to start first."""

import asyncio
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagewire_cli.local import LocalServices
from pagewire_client.async_client import AsyncClient
from pagewire_client.batch import BatchProgress, OnProgress
from pagewire_client.calls import OutputStream
from pagewire_client.chat import ChatPrompt, Messages
from pagewire_client.client import Client
from pagewire_client.deployment import ModelInfo
from pagewire_client.errors import Unavailable
from pagewire_client.outputs import RequestOutput, TextLogprobs
from pagewire_client.pooling import (
    Classification,
    EmbedOptions,
    PoolingOptions,
    RankedDocument,
)
from pagewire_client.requests import (
    ChatBatchOptions,
    GenerateOptions,
    Prompt,
    Text,
    prompt_list,
    without_chat_options,
)
from pagewire_client.retry import RetryPolicy
from pagewire_client.sampling_params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from pagewire_client.pooling import Float32Array


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[OnProgress | None]:
    """A progress bar on standard error, as a callback; None if it is not to be shown."""
    if not shown:
        yield None
        return
    rates = TextColumn("{task.fields[rates]}")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), rates)
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=None, rates="")

        def on_progress(batch: BatchProgress) -> None:
            text = _rates(batch, progress.tasks[0].elapsed or 0.0)
            progress.update(
                task, total=batch.num_requests, completed=batch.num_finished, rates=text
            )

        yield on_progress


def _rates(batch: BatchProgress, elapsed_s: float) -> str:
    if elapsed_s <= 0:
        return ""
    prompt = batch.num_prompt_tokens / elapsed_s
    output = batch.num_generated_tokens / elapsed_s
    return f"in {prompt:.0f} out {output:.0f} tokens/s"


_GRACE_PERIOD_S = 5.0
"""Short, because only this object uses the services, and closes them when nothing is running."""

_RETRY = RetryPolicy(recovery_timeout_s=30.0)

EngineFlag: TypeAlias = str | int | float | bool | Path | None


def _started(
    model: str,
    num_workers: int,
    start_timeout_s: float | None,
    engine_flags: Mapping[str, EngineFlag],
) -> LocalServices:
    flags = {"grace_period": _GRACE_PERIOD_S} | dict(engine_flags)
    services = LocalServices(model, engine_flags=flags, num_workers=num_workers)
    services.start(start_timeout_s)
    return services


_OF_VLLM = {
    **dict.fromkeys(("sleep", "wake_up"), "there is none; close() frees the memory"),
    "beam_search": "use generate with beam_width",
    "encode": "use embed, classify or score",
    "reward": "there is none; classify returns the outputs of a classifier",
    "get_default_sampling_params": "use SamplingParams(), which leaves the model its defaults",
    "preprocess_chat": "use tokenize, which takes messages",
    "reset_prefix_cache": "there is none; another cache_salt separates requests",
    **dict.fromkeys(("start_profile", "stop_profile"), "use the RPC of a worker"),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine"), "services run the model"),
}
"""What stands for attributes of vLLM's `LLM` that this one lacks."""


class Tokenizer:
    """The tokenizer of a model, which its services have, under names of `transformers`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._client.tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Messages | ChatPrompt, *, tokenize: bool = True
    ) -> list[int] | str:
        """Token ids, or the text, of a conversation in the model's chat template."""
        token_ids = self._client.tokenize(messages)
        return token_ids if tokenize else self.decode(token_ids)


class LLM:
    """A model with private services, which stop with it.

        with LLM(model="embedded", dtype="float32") as llm:
            for output in llm.generate(["One day,", "Two plus two"], SamplingParams(n=2)):
                print(output.outputs[0].text)

    The services are three processes on this machine. They stop on `close`, at the end of a `with`
    block, when the object is deleted, and when this process ends, even if it is killed.
    """

    def __init__(
        self,
        model: str = "embedded",
        *,
        num_workers: int = 1,
        start_timeout_s: float | None = None,
        **engine_flags: EngineFlag,
    ) -> None:
        """Returns when the model is loaded.

        `model`: a checkpoint's folder, a GGUF file, a Hugging Face hub id, or `embedded` for the
        small model that comes with Pagewire. `engine_flags`: the services' flags, such as `dtype`,
        `max_model_len`, `kv_cache_memory`, `max_num_seqs`; `pagewire serve --help` lists them.
        Raises LocalServiceError with the service's own message if one cannot start.
        """
        self._services = _started(model, num_workers, start_timeout_s, engine_flags)
        self._close = weakref.finalize(self, self._services.stop)
        self._client = Client(self._services.addresses, retry=_RETRY, api_key="")
        self._model = model

    def __repr__(self) -> str:
        return f"LLM(model={self._model!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the services."""
        self._client.close()
        self._close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> list[RequestOutput]:
        """The answers to all prompts, in their order.

        A prompt is a text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}` or a list
        of chat messages; a single prompt need not be in a list. `sampling_params` applies to
        all, or is a list with one for each; its fields may be given as keyword arguments instead,
        such as `temperature=0`. `priority` is one for all, too, or a list: with `policy="priority"`
        lower values are served earlier. `use_tqdm` shows a progress bar with tokens per second. The
        first prompt that fails raises, and ends the others.
        """
        with self._batch(use_tqdm=use_tqdm) as on_progress:
            return self._client.generate_many(
                prompts, sampling_params, on_progress=on_progress, priority=priority, **sampling
            )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> OutputStream:
        """Stream the answer to one prompt as it is generated."""
        return self._client.stream(prompt, sampling_params, **options)

    def logprobs(
        self, texts: Text | Sequence[Text], *, context: Text | None = None, use_tqdm: bool = True
    ) -> list[TextLogprobs]:
        """The log probability of each text, or list of token ids, after `context` if it is given,
        as `Client.logprobs` returns it."""
        with self._batch(use_tqdm=use_tqdm) as on_progress:
            return self._client.logprobs(texts, context=context, on_progress=on_progress)

    def embed(
        self, prompts: Text | Sequence[Text], **options: Unpack[EmbedOptions]
    ) -> "Float32Array":
        """The vectors of texts, or of lists of token ids: [num_texts, size]. Needs numpy."""
        with self._batch(use_tqdm=False):
            return self._client.embed(prompts, **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[float]:
        """How well two texts belong together: of each pair of two lists of the same length, or of
        one text with each of a list."""
        second = [data_2] if isinstance(data_2, str) else data_2
        first = [data_1] if isinstance(data_1, str) else data_1
        if len(first) == 1:
            first = [first[0]] * len(second)
        if len(first) != len(second):
            raise ValueError(
                f"data_1 must be one text or as many as data_2, {len(second)}, not {len(first)}"
            )
        pairs = list(zip(first, second, strict=True))
        with self._batch(use_tqdm=False):
            return self._client.score(pairs, instruction=instruction, **options)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[RankedDocument]:
        """The documents in descending order of how well they answer a query."""
        with self._batch(use_tqdm=False):
            return self._client.rank(
                query, documents, top_n=top_n, instruction=instruction, **options
            )

    def classify(
        self, prompts: Text | Sequence[Text], **options: Unpack[PoolingOptions]
    ) -> list[Classification]:
        """The labels of texts, each with its probability. Needs numpy."""
        with self._batch(use_tqdm=False):
            return self._client.classify(prompts, **options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatBatchOptions],
    ) -> list[RequestOutput]:
        """The model's turn in one conversation or several, in their order; `ChatOptions` describes
        the arguments for all. Outputs have `reasoning` and `tool_calls` apart from their `text`."""
        chat, sampling = without_chat_options(options)
        prompts = [ChatPrompt(messages=turns, **chat) for turns in prompt_list(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **sampling)

    def tokenize(
        self, text: str | Messages | ChatPrompt, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text, or of a conversation in the model's chat template."""
        return self._client.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer(self._client)

    def get_model(self) -> ModelInfo:
        """Facts about the model."""
        return self._client.get_model()

    if not TYPE_CHECKING:  # checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            hint = f": vLLM's; {_OF_VLLM[name]}" if name in _OF_VLLM else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @contextmanager
    def _batch(self, *, use_tqdm: bool) -> Iterator[OnProgress | None]:
        """A progress bar; raises the services' own error if they have failed."""
        with progress_bar(shown=use_tqdm) as on_progress:
            try:
                yield on_progress
            except Unavailable as error:
                if self._services.failure:
                    raise self._services.failure from error
                raise


class AsyncLLM(AsyncClient):
    """A model with private services for asyncio: an `AsyncClient` of them.

        async with AsyncLLM(model="embedded") as llm:
            async for text in llm.stream("One day,").text_deltas():
                print(text, end="")

    The services stop as those of `LLM` do.
    """

    def __init__(
        self,
        model: str = "embedded",
        *,
        num_workers: int = 1,
        start_timeout_s: float | None = None,
        **engine_flags: EngineFlag,
    ) -> None:
        """Blocks until the model is loaded. Arguments and errors are those of `LLM`."""
        services = _started(model, num_workers, start_timeout_s, engine_flags)
        super().__init__(services.addresses, retry=_RETRY, api_key="")
        # The connections live as long as any client of `with_options` and any stream.
        self._stop_services = weakref.finalize(self._caller.connections, services.stop)

    async def close(self) -> None:
        """Stop the services."""
        await super().close()
        await asyncio.to_thread(self._stop_services)
