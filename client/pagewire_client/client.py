"""The client that blocks: its methods are those of `AsyncClient`, run without an event loop."""

import copy
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pagewire_client.async_client import AsyncClient
from pagewire_client.calls import AsyncOutputStream, OutputStream
from pagewire_client.connection import BLOCKING, Address, TlsOptions
from pagewire_client.retry import RetryPolicy
from pagewire_client.synchronization import iterate, run

P = ParamSpec("P")
T = TypeVar("T")


class _Calls(AsyncClient):
    """An `AsyncClient` whose coroutines block instead of being suspended."""

    mode = BLOCKING


def _method(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    @functools.wraps(method)
    def blocking(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(client._calls, *args, **kwargs))

    return blocking


def _stream(
    method: Callable[Concatenate[AsyncClient, P], AsyncOutputStream],
) -> Callable[Concatenate["Client", P], OutputStream]:
    @functools.wraps(method)
    def blocking(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> OutputStream:
        return OutputStream(method(client._calls, *args, **kwargs))

    return blocking


def _iterator(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Client", P], Generator[T, None, None]]:
    @functools.wraps(method)
    def blocking(
        client: "Client", /, *args: P.args, **kwargs: P.kwargs
    ) -> Generator[T, None, None]:
        return iterate(method(client._calls, *args, **kwargs))

    return blocking


class Client:
    """Talks to one deployment through any of its frontends. Safe to share between threads.

    A method has the arguments of `AsyncClient`'s method of that name, blocks, and returns its
    result. Streams are iterators, which another thread may close.
    """

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
        """Connects at the first call. The arguments are those of `AsyncClient`."""
        self._calls = _Calls(
            address,
            tls=tls,
            api_key=api_key,
            retry=retry,
            timeout=timeout,
            max_connections=max_connections,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._calls.addresses!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def with_options(
        self, *, timeout: float | None = None, retry: RetryPolicy | None = None
    ) -> Self:
        """This client with other options, over the same connections; None leaves one as it is."""
        other = copy.copy(self)
        other._calls = self._calls.with_options(timeout=timeout, retry=retry)
        return other

    close = _method(AsyncClient.close)
    """Close the connections and cancel open streams."""
    generate = _method(AsyncClient.generate)
    """The whole answer to one prompt: a text, token ids, or a chat."""
    stream = _stream(AsyncClient.stream)
    """Stream the answer to one prompt as it is generated."""
    chat = _method(AsyncClient.chat)
    """The model's turn in a conversation."""
    generate_many = _method(AsyncClient.generate_many)
    """The answers to many prompts, in their order."""
    try_generate_many = _method(AsyncClient.try_generate_many)
    """Like `generate_many`, with an error in the place of a request that failed."""
    logprobs = _method(AsyncClient.logprobs)
    """The log probability of each text, or list of token ids."""
    embed = _method(AsyncClient.embed)
    """The vectors of texts: [num_texts, size]."""
    embed_tokens = _method(AsyncClient.embed_tokens)
    """A vector for each token of each text: [num_tokens, size]."""
    score = _method(AsyncClient.score)
    """How well the two texts of each pair belong together."""
    rank = _method(AsyncClient.rank)
    """The documents in descending order of how well they answer a query."""
    classify = _method(AsyncClient.classify)
    """The labels of texts, or of pairs of texts."""
    classify_tokens = _method(AsyncClient.classify_tokens)
    """The labels of each token of each text."""
    abort = _method(AsyncClient.abort)
    """End a running request. Raises NotFound if no request has this id."""
    tokenize = _method(AsyncClient.tokenize)
    """Token ids of a text, or of a conversation in the model's chat template."""
    detokenize = _method(AsyncClient.detokenize)
    """Text of token ids."""
    get_model = _method(AsyncClient.get_model)
    """Facts about a served model."""
    load_adapter = _method(AsyncClient.load_adapter)
    """Make a LoRA adapter usable under a name. For operators."""
    unload_adapter = _method(AsyncClient.unload_adapter)
    """Make an adapter's name unusable. For operators."""
    list_adapters = _method(AsyncClient.list_adapters)
    """The adapters that may be used, by model."""
    get_status = _method(AsyncClient.get_status)
    """A snapshot of the deployment."""
    watch_status = _iterator(AsyncClient.watch_status)
    """A snapshot every `interval_s` seconds (0.1 to 60), until the iterator is closed."""
