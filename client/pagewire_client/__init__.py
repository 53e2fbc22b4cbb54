"""The Python client of Pagewire.

Ways to use a model, which take the same prompts and `SamplingParams`; `AsyncLLM` is an
`AsyncClient` of private services:

    with Client("127.0.0.1:7600") as client:            # a running deployment
        for delta in client.stream("Once upon a time", SamplingParams(max_tokens=64)):
            print(delta.text, end="", flush=True)

    async with AsyncClient("127.0.0.1:7600") as client:  # the same for asyncio
        output = await client.generate("Once upon a time")

    with LLM(model="embedded") as llm:                   # private services, ended with `llm`
        outputs = llm.generate(["One.", "Two."], SamplingParams(temperature=0))

| module | holds |
| --- | --- |
| `client`, `async_client` | the API: `Client`, `AsyncClient` |
| `calls`, `async_calls` | the gRPC calls behind it: retries, failover, output streams |
| `stream_state`, `batch`, `retry`, `synchronization` | what both share; no I/O |
| `sampling_params`, `chat`, `requests` | what is sent |
| `outputs`, `deployment`, `errors` | what is returned or raised |
| `connection` | addresses, TLS, call metadata, channels |
| `llm` | offline use: services that `pagewire_cli.local` starts and supervises |

`make sync-client` generates `client` and `calls` from `async_client` and `async_calls`.

The promise of a stream: if a connection or a frontend dies, the stream continues where it broke.
The client submits the request again with all that it has received (`resume` in the protos) and the
seed that the server reported at the start, so that the tokens are those of the undisturbed answer.
If it cannot be continued, it raises one of `errors`; a stream that was cut never looks complete.

Needs neither torch nor numpy nor a model: the server tokenizes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire_client.async_client import AsyncClient
    from pagewire_client.batch import BatchProgress
    from pagewire_client.chat import ChatMessage, ChatPrompt, Tool, ToolCall
    from pagewire_client.client import Client
    from pagewire_client.connection import TlsOptions
    from pagewire_client.deployment import EngineStatus, ModelInfo
    from pagewire_client.errors import (
        AlreadyExists,
        DeadlineExceeded,
        FailedPrecondition,
        InvalidArgument,
        LocalServiceError,
        NotAuthorized,
        NotFound,
        Overloaded,
        PagewireError,
        RequestAborted,
        ServerError,
        Unavailable,
    )
    from pagewire_client.llm import LLM, AsyncLLM
    from pagewire_client.outputs import (
        CompletionOutput,
        Logprob,
        OutputDelta,
        OutputToolCall,
        OutputToolCallDelta,
        RequestOutput,
        Score,
        Timings,
        Usage,
    )
    from pagewire_client.retry import NO_RETRIES, RetryPolicy
    from pagewire_client.sampling_params import SamplingOptions, SamplingParams

__all__ = [
    "LLM",
    "NO_RETRIES",
    "AlreadyExists",
    "AsyncClient",
    "AsyncLLM",
    "BatchProgress",
    "ChatMessage",
    "ChatPrompt",
    "Client",
    "CompletionOutput",
    "DeadlineExceeded",
    "EngineStatus",
    "FailedPrecondition",
    "InvalidArgument",
    "LocalServiceError",
    "Logprob",
    "ModelInfo",
    "NotAuthorized",
    "NotFound",
    "OutputDelta",
    "OutputToolCall",
    "OutputToolCallDelta",
    "Overloaded",
    "PagewireError",
    "RequestAborted",
    "RequestOutput",
    "RetryPolicy",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "ServerError",
    "Timings",
    "TlsOptions",
    "Tool",
    "ToolCall",
    "Unavailable",
    "Usage",
]

# Imported on first use: most of these modules import grpc, which would delay the command line's
# start and programs that need other names.
_NAMES = {
    "async_client": "AsyncClient",
    "batch": "BatchProgress",
    "chat": "ChatMessage ChatPrompt Tool ToolCall",
    "client": "Client",
    "connection": "TlsOptions",
    "deployment": "EngineStatus ModelInfo",
    "errors": "AlreadyExists DeadlineExceeded FailedPrecondition InvalidArgument LocalServiceError "
    "NotAuthorized NotFound Overloaded PagewireError RequestAborted ServerError Unavailable",
    "llm": "AsyncLLM LLM",
    "outputs": "CompletionOutput Logprob OutputDelta OutputToolCall OutputToolCallDelta "
    "RequestOutput Score Timings Usage",
    "retry": "NO_RETRIES RetryPolicy",
    "sampling_params": "SamplingOptions SamplingParams",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __dir__() -> list[str]:
    """What notebooks and other interactive shells offer to complete."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
