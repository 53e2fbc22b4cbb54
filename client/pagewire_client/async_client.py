"""The client for asyncio."""

import copy
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import pooling_pb2
from pagewire.v1.status_pb2 import StatusDetail
from pagewire_client import connection, pooling, requests
from pagewire_client.batch import Batch, OnProgress
from pagewire_client.calls import AsyncOutputStream, Caller
from pagewire_client.chat import ChatPrompt, Messages
from pagewire_client.connection import Address, TlsOptions
from pagewire_client.deployment import Adapter, EngineStatus, ModelInfo
from pagewire_client.errors import PagewireError
from pagewire_client.outputs import RequestOutput, TextLogprobs, logprobs_of
from pagewire_client.pooling import (
    Classification,
    EmbedOptions,
    PooledInputs,
    PoolingOptions,
    RankedDocument,
    vectors_of,
)
from pagewire_client.requests import BatchOptions, GenerateOptions, Prompt, StatusOptions, Text
from pagewire_client.retry import RetryPolicy
from pagewire_client.sampling_params import SamplingParams, message_of

if TYPE_CHECKING:
    from pagewire_client.pooling import Float32Array


class AsyncClient:
    """Talks to one deployment through any of its frontends. To be used from one event loop.

    Methods that generate take `SamplingParams`, or its fields as keyword arguments:
    `generate("Hello", temperature=0, max_tokens=50)`.

    Methods raise what `pagewire_client.errors` lists. `timeout`, in seconds, bounds a call with
    all its retries; None takes the client's, and infinity waits as long as it takes. `model` may be
    left out when the deployment serves one.
    """

    mode: ClassVar = connection.ASYNCIO

    def __init__(
        self,
        address: Address | Sequence[Address] | None = None,
        *,
        tls: TlsOptions | None = None,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        max_connections: int = 1,
    ) -> None:
        """Connects at the first call.

        `address`: `HOST:PORT` or `unix:PATH`, or several of them to fail over between, as a list or
        separated by commas; None: the variable PAGEWIRE_ADDRESS, or port 7600 of this machine.
        `api_key`: sent as `authorization: Bearer KEY`; None: the first of the variable
        PAGEWIRE_API_KEY, which may hold several for a server, separated by spaces.
        `timeout`: of calls without one of their own.
        `max_connections`: to one address, opened as needed. Each carries up to 1,000 open requests;
        further requests wait in the client, in order, until one ends.
        """
        options = connection.connection_options(address, tls, api_key)
        connections = connection.Connections(options, self.mode)
        self._caller = Caller(connections, retry or RetryPolicy(), timeout, max_connections)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.addresses!r})"

    @property
    def addresses(self) -> str:
        """The addresses of frontends, separated by commas."""
        return ",".join(self._caller.connections.options.addresses)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections and cancel open streams."""
        for channel in self._caller.connections.close():
            await self.mode.close_channel(channel)

    def with_options(
        self, *, timeout: float | None = None, retry: RetryPolicy | None = None
    ) -> Self:
        """This client with other options, over the same connections; None leaves one as it is."""
        other = copy.copy(self)
        other._caller = self._caller.with_options(timeout, retry)
        return other

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestOutput:
        """The whole answer to one prompt: a text, token ids, or a chat."""
        request = requests.generate_request(prompt, sampling_params, is_whole=True, **options)
        async with AsyncOutputStream(self._caller, request, options.get("timeout")) as stream:
            return await stream.final()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncOutputStream:
        """Stream the answer to one prompt as it is generated."""
        request = requests.generate_request(prompt, sampling_params, **options)
        return AsyncOutputStream(self._caller, request, options.get("timeout"))

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[requests.ChatCallOptions],
    ) -> RequestOutput:
        """The model's turn in a conversation; `ChatOptions` describes its own arguments.

        `stream(messages)` streams it, and `stream({"messages": messages, "tools": tools})`. The
        outputs have the model's `reasoning` and its `tool_calls` apart from their `text`.
        """
        chat, others = requests.without_chat_options(options)
        return await self.generate(ChatPrompt(messages=messages, **chat), sampling_params, **others)

    async def generate_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[RequestOutput]:
        """The answers to many prompts, in their order.

        `sampling_params` applies to all, or is a list with one for each. The first request that
        fails ends the others and raises; the message names its prompt.
        """
        return (await self._run_batch(True, prompts, sampling_params, options)).outputs()

    async def try_generate_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[RequestOutput | PagewireError]:
        """Like `generate_many`, with an error in the place of a request that failed."""
        return (await self._run_batch(False, prompts, sampling_params, options)).outcomes()

    async def logprobs(
        self,
        texts: Text | Sequence[Text],
        *,
        context: Text | None = None,
        model: str | None = None,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[TextLogprobs]:
        """The log probability of each text, or list of token ids, after `context` if it is given.

        The tokens of `context` do not count. A text with its context must be shorter than
        the model's length.
        """
        prompts, start = requests.prompt_list(texts), 0
        if context is not None:
            first = await self._token_ids(context, True, model, timeout)
            prompts = [
                [*first, *await self._token_ids(text, False, model, timeout)] for text in prompts
            ]
            start = len(first)
        outputs = await self.generate_many(
            prompts, requests.PROMPT_LOGPROBS, model=model, timeout=timeout, on_progress=on_progress
        )
        return [logprobs_of(output, start) for output in outputs]

    async def embed(
        self, texts: Text | Sequence[Text], **options: Unpack[EmbedOptions]
    ) -> "Float32Array":
        """The vectors of texts, or of lists of token ids: [num_texts, size]. Needs numpy.

        A text's vector has the same bits in every call. The first text that fails raises; the
        message names it. Thousands of texts are sent and answered piece by piece.
        """
        found = await self._embed(texts, options, of_tokens=False)
        entries = [entry for entries in found for entry in entries]
        return vectors_of(entries).reshape(len(found), -1)

    async def embed_tokens(
        self, texts: Text | Sequence[Text], **options: Unpack[EmbedOptions]
    ) -> "list[Float32Array]":
        """A vector for each token of each text, for late interaction: [num_tokens, size]. Needs
        numpy."""
        found = await self._embed(texts, options, of_tokens=True)
        return [vectors_of(parts).reshape(parts[0].num_tokens, -1) for parts in found]

    async def _embed(
        self, texts: Text | Sequence[Text], options: Any, *, of_tokens: bool
    ) -> list[list[Any]]:
        others = dict(options)
        embed = pooling.embed_proto(others, of_tokens=of_tokens)
        first = pb.EmbedRequest(options=pooling.options_proto(others), embed=embed)
        values = requests.prompt_list(texts)
        pooled = PooledInputs(
            "Embed", first, pooling.text_input, values, "texts", of_tokens=of_tokens
        )
        return await self._caller.pool(pooled, options.get("timeout"))

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        apply_activation: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[float]:
        """How well the two texts of each pair belong together: by a model that reads both, or by
        the similarity of their vectors. `instruction`: what a model with a place for it is to judge
        by; `apply_activation`: False for the score of a model that reads both before its sigmoid.
        """
        score = pb.ScoreOptions(instruction=instruction, apply_activation=apply_activation)
        first = pb.ScoreRequest(options=pooling.options_proto(options), score=score)
        inputs = PooledInputs("Score", first, pooling.pair_input, pairs, "pairs")
        return [entry.score for (entry,) in await self._caller.pool(inputs, options.get("timeout"))]

    async def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[RankedDocument]:
        """The documents in descending order of how well they answer a query; the first `top_n` of
        them, if it is given."""
        first = message_of(pb.RankRequest, {"query": query, "top_n": top_n})
        first.options.CopyFrom(pooling.options_proto(options))
        first.score.CopyFrom(pb.ScoreOptions(instruction=instruction))
        if isinstance(documents, str):
            raise ValueError("documents: expected a list of texts, got a text")
        documents = list(documents)
        inputs = PooledInputs("Rank", first, pooling.document_input, documents, "documents")
        pooled = await self._caller.pool(inputs, options.get("timeout"))
        found = [entry for entries in pooled for entry in entries]
        found.sort(key=lambda entry: (-entry.score, entry.index))
        return [RankedDocument(e.index, e.score, documents[e.index]) for e in found]

    async def classify(
        self,
        texts: Text | tuple[str, str] | Sequence[Text | tuple[str, str]],
        *,
        apply_activation: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[Classification]:
        """The labels of texts, or of pairs of texts, each with its probability, or with
        `apply_activation=False` its logit. Needs numpy."""
        is_pair = isinstance(texts, tuple) and len(texts) == 2 and isinstance(texts[0], str)
        listed = [texts] if is_pair else texts
        found, labels = await self._classify(listed, apply_activation, options, of_tokens=False)
        return [Classification(labels, vectors_of(entries)) for entries in found]

    async def classify_tokens(
        self,
        texts: Text | Sequence[Text],
        *,
        apply_activation: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[list[Classification]]:
        """The labels of each token of each text, by a model trained for that. Needs numpy."""
        found, labels = await self._classify(texts, apply_activation, options, of_tokens=True)
        rows = [vectors_of(parts).reshape(-1, len(labels)) for parts in found]
        return [[Classification(labels, row) for row in of_text] for of_text in rows]

    async def _classify(
        self, texts: Any, apply_activation: bool | None, options: Any, *, of_tokens: bool
    ) -> tuple[list[list[Any]], Sequence[str]]:
        classify = pb.ClassifyOptions(apply_activation=apply_activation)
        if of_tokens:
            classify.type = pooling_pb2.POOLING_TYPE_ALL
        first = pb.ClassifyRequest(options=pooling.options_proto(options), classify=classify)
        values = requests.prompt_list(texts)
        inputs = PooledInputs(
            "Classify", first, pooling.text_input, values, "texts", of_tokens=of_tokens
        )
        return await self._caller.pool(inputs, options.get("timeout")), inputs.labels

    async def abort(self, request_id: str, *, timeout: float | None = None) -> None:
        """End a running request. Raises NotFound if no request has this id."""
        await self._caller.unary("Abort", pb.AbortRequest(request_id=request_id), timeout)

    async def tokenize(
        self,
        text: str | Messages | ChatPrompt,
        *,
        model: str | None = None,
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text, or of a conversation in the model's chat template."""
        request = requests.tokenize_request(text, model, add_special_tokens)
        return list((await self._caller.unary("Tokenize", request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids."""
        values = {"token_ids": token_ids, "model": model}
        request = message_of(pb.DetokenizeRequest, values)
        request.skip_special_tokens = skip_special_tokens
        text: str = (await self._caller.unary("Detokenize", request, timeout)).text
        return text

    async def get_model(
        self, model: str | None = None, *, timeout: float | None = None
    ) -> ModelInfo:
        """Facts about a served model."""
        request = pb.GetModelRequest(model=model)
        info: ModelInfo = (await self._caller.unary("GetModel", request, timeout)).model
        return info

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        model: str | None = None,
        replace: bool = False,
        timeout: float | None = None,
    ) -> Adapter:
        """Make a LoRA adapter usable under a name, on all workers of a model or on none. For
        operators.

        `path`: of its folder on the workers' disks. `replace`: whether the name may have another
        content, with which the requests that use it continue.
        """
        request = pb.LoadAdapterRequest(name=name, path=path, model=model, replace=replace)
        adapter: Adapter = (await self._caller.unary("LoadAdapter", request, timeout)).adapter
        return adapter

    async def unload_adapter(self, name: str, *, timeout: float | None = None) -> int:
        """Make an adapter's name unusable; returns how many requests continue with it. For
        operators. Raises NotFound for an unknown name."""
        request = pb.UnloadAdapterRequest(name=name)
        number: int = (await self._caller.unary("UnloadAdapter", request, timeout)).num_requests
        return number

    async def list_adapters(self, *, timeout: float | None = None) -> dict[str, list[Adapter]]:
        """The adapters that may be used, by model."""
        answer = await self._caller.unary("ListAdapters", pb.ListAdaptersRequest(), timeout)
        return {entry.model: list(entry.adapters.adapters) for entry in answer.models}

    async def get_status(
        self, *, timeout: float | None = None, **detail: Unpack[StatusOptions]
    ) -> EngineStatus:
        """A snapshot of the deployment."""
        request = pb.GetStatusRequest(detail=StatusDetail(**detail))
        status: EngineStatus = (await self._caller.unary("GetStatus", request, timeout)).status
        return status

    async def watch_status(
        self, interval_s: float = 1.0, **detail: Unpack[StatusOptions]
    ) -> AsyncGenerator[EngineStatus, None]:
        """A snapshot every `interval_s` seconds (0.1 to 60), until the iterator is closed."""
        if not 0.1 <= interval_s <= 60:
            raise ValueError(f"interval_s: expected 0.1 to 60 seconds, got {interval_s!r}")
        request = pb.WatchStatusRequest(
            interval_ms=round(interval_s * 1000), detail=StatusDetail(**detail)
        )
        async for response in self._caller.watch(request):
            yield response.status

    async def _token_ids(
        self, text: Text, is_first: bool, model: str | None, timeout: float | None
    ) -> Sequence[int]:
        if not isinstance(text, str):
            return text
        return await self.tokenize(text, add_special_tokens=is_first, model=model, timeout=timeout)

    async def _run_batch(
        self,
        fail_fast: bool,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: BatchOptions,
    ) -> Batch:
        batch = Batch(
            requests.generate_requests(prompts, sampling_params, **options),
            self._caller.policy,
            self._caller.deadline(options.get("timeout")),
            max_in_flight=options.get("max_in_flight"),
            fail_fast=fail_fast,
        )
        await self._caller.run_batch(batch, options.get("on_progress"))
        return batch
