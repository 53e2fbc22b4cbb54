"""The client: its methods are calls for asyncio."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self, Unpack

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import requests
from pagewire_client.async_calls import AsyncCaller, AsyncOutputStream
from pagewire_client.batch import Batch, OnProgress
from pagewire_client.chat import ChatPrompt, Messages, Tools
from pagewire_client.connection import (
    DEFAULT_ADDRESS,
    Address,
    Connections,
    TlsOptions,
    async_channel,
    connection_options,
)
from pagewire_client.deployment import EngineStatus, ModelInfo, from_proto
from pagewire_client.errors import PagewireError
from pagewire_client.outputs import RequestOutput
from pagewire_client.requests import Prompt
from pagewire_client.retry import Deadline, RetryPolicy
from pagewire_client.sampling_params import SamplingOptions, SamplingParams, given_params


class AsyncClient:
    """Talks to one deployment through any of its frontends. To be used from one event loop.

    Methods that generate take `SamplingParams`, or its fields as keyword arguments:
    `generate("Hello", temperature=0, max_tokens=50)`.

    Methods raise what `pagewire_client.errors` lists. `timeout`, in seconds, bounds a call with
    all its retries; None waits as long as it takes. `model` may be left out when the deployment
    serves one.
    """

    def __init__(
        self,
        address: Address | Sequence[Address] = DEFAULT_ADDRESS,
        *,
        tls: TlsOptions | None = None,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        max_connections: int = 1,
    ) -> None:
        """Connects at the first call.

        `address`: `HOST:PORT` or `unix:PATH`, or several of them to fail over between, as a list or
        separated by commas.
        `api_key`: sent as `authorization: Bearer KEY`.
        `max_connections`: to one address, opened as needed. Each carries up to 1,000 open requests;
        further requests wait in the client, in order, until one ends.
        """
        connections = Connections(connection_options(address, tls, api_key), async_channel)
        self._caller = AsyncCaller(connections, retry or RetryPolicy(), max_connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections and cancel open streams."""
        for channel in self._caller.connections.close():
            await channel.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> RequestOutput:
        """The whole answer to one prompt: a text, token ids, or a chat."""
        request = requests.generate_request(
            prompt,
            given_params(sampling_params, sampling),
            model=model,
            request_id=request_id,
            priority=priority,
            is_whole=True,
        )
        async with AsyncOutputStream(self._caller, request, timeout) as stream:
            async for _ in stream:
                pass
            return stream.output

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncOutputStream:
        """Stream the answer to one prompt as it is generated."""
        request = requests.generate_request(
            prompt,
            given_params(sampling_params, sampling),
            model=model,
            request_id=request_id,
            priority=priority,
        )
        return AsyncOutputStream(self._caller, request, timeout)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        model: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> RequestOutput:
        """The model's turn in a conversation; `ChatPrompt` describes the arguments.

        `stream(messages)` streams it, and `stream({"messages": messages, "tools": tools})`. Calls
        of tools are in the answer's text, in the model's own format.
        """
        prompt = ChatPrompt(
            messages=messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return await self.generate(
            prompt,
            sampling_params,
            model=model,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            **sampling,
        )

    async def generate_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_in_flight: int | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[RequestOutput]:
        """The answers to many prompts, in their order; arguments as for `try_generate_many`.

        The first request that fails ends the others and raises; the message names its prompt.
        """
        batch = await self._run_batch(
            prompts,
            given_params(sampling_params, sampling),
            model=model,
            priority=priority,
            timeout=timeout,
            max_in_flight=max_in_flight,
            on_progress=on_progress,
            fail_fast=True,
        )
        return batch.outputs()

    async def try_generate_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_in_flight: int | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[RequestOutput | PagewireError]:
        """The answers to many prompts, in their order; an error where a request failed.

        `sampling_params` applies to all, or is a list with one for each. `timeout` is for all
        together; `max_in_flight` is the most requests sent and unfinished; `on_progress` is called
        with a `BatchProgress` for every message received.
        """
        batch = await self._run_batch(
            prompts,
            given_params(sampling_params, sampling),
            model=model,
            priority=priority,
            timeout=timeout,
            max_in_flight=max_in_flight,
            on_progress=on_progress,
            fail_fast=False,
        )
        return batch.outcomes()

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
        request = requests.tokenize_request(
            text, model=model, add_special_tokens=add_special_tokens
        )
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
        request = requests.detokenize_request(
            token_ids, model=model, skip_special_tokens=skip_special_tokens
        )
        text: str = (await self._caller.unary("Detokenize", request, timeout)).text
        return text

    async def get_model(
        self, model: str | None = None, *, timeout: float | None = None
    ) -> ModelInfo:
        """Facts about a served model."""
        request = pb.GetModelRequest(model=model)
        return from_proto(ModelInfo, (await self._caller.unary("GetModel", request, timeout)).model)

    async def get_status(
        self,
        *,
        include_requests: bool = False,
        include_blocks: bool = False,
        max_requests: int | None = None,
        timeout: float | None = None,
    ) -> EngineStatus:
        """A snapshot of the deployment.

        `include_requests`: with live requests, up to `max_requests` (256 if None), and those that
        ended most recently. `include_blocks`: with the owners of KV blocks, and the block tables
        of requests.
        """
        detail = requests.status_detail(include_requests, include_blocks, max_requests)
        request = pb.GetStatusRequest(detail=detail)
        return from_proto(
            EngineStatus, (await self._caller.unary("GetStatus", request, timeout)).status
        )

    async def watch_status(
        self,
        interval_s: float = 1.0,
        *,
        include_requests: bool = False,
        include_blocks: bool = False,
        max_requests: int | None = None,
    ) -> AsyncIterator[EngineStatus]:
        """A snapshot every `interval_s` seconds (0.1 to 60), until the iterator is closed; other
        arguments as for `get_status`."""
        detail = requests.status_detail(include_requests, include_blocks, max_requests)
        request = pb.WatchStatusRequest(interval_ms=round(interval_s * 1000), detail=detail)
        async for response in self._caller.watch(request):
            yield from_proto(EngineStatus, response.status)

    async def _run_batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        fail_fast: bool,
        model: str | None,
        priority: int,
        timeout: float | None,
        max_in_flight: int | None,
        on_progress: OnProgress | None,
    ) -> Batch:
        batch = Batch(
            requests.generate_requests(prompts, sampling_params, model=model, priority=priority),
            self._caller.policy,
            Deadline(timeout),
            max_in_flight=max_in_flight,
            fail_fast=fail_fast,
        )
        await self._caller.run_batch(batch, on_progress)
        return batch
