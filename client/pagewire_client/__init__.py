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
| `calls` | the gRPC calls behind both: retries, failover, output streams |
| `synchronization` | how the same calls are awaited by tasks, or block threads |
| `stream_state`, `batch`, `retry` | bookkeeping, without I/O |
| `sampling_params`, `chat`, `requests` | what is sent |
| `pooling` | what is sent and returned for vectors, scores and labels |
| `outputs`, `deployment`, `errors` | what is returned or raised |
| `connection` | addresses, TLS, call metadata, channels |
| `llm` | offline use: services that `pagewire_cli.local` starts and supervises |

The promise of a stream: if a connection or a frontend dies, the stream continues where it broke.
The client submits the request again with all that it has received (`resume` in the protos) and the
seed that the server reported at the start, so that the tokens are those of the undisturbed answer.
If it cannot be continued, it raises one of `errors`; a stream that was cut never looks complete.

Needs neither torch nor a model: the server tokenizes. Vectors and labels are arrays of numpy, which
is imported where one is returned.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

# Imported on first use: most of these modules import grpc, which would delay the command line's
# start and programs that need other names. Type checkers read the names in `__init__.pyi`, too.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    name.name: str(statement.module)
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
}
__all__ = sorted(_MODULES)


def __dir__() -> list[str]:
    """What notebooks and other interactive shells offer to complete."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
