"""Endpoints of vLLM's server that this one lacks: 501 and what to do instead, by path."""

from collections.abc import Awaitable, Callable
from typing import Never

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.http.middleware import Caller, HttpServices

_POOLING = (
    "only models that generate text are served; serve embeddings, classes and scores elsewhere"
)
_LORA = "LoRA adapters cannot be loaded; merge them into the weights and serve these as a model"
_SLEEP = "a worker cannot sleep; `pagewire drain` ends one without losing its requests"
_PAUSE = "the service cannot be paused; `pagewire drain` empties a worker, and SIGTERM a frontend"
_WEIGHTS = (
    "weights cannot be changed at run time; start workers with the new model and drain the old"
)
_RENDER = (
    "conversations are not rendered to text; /tokenize with `messages` returns their token ids"
)
_BATCHES = "batches are not stored; send the requests at once, they are batched as they run"
_STORED = "responses are not stored; send the whole conversation as `input` each time"
_PROFILES = "profiles are not taken over HTTP; /metrics and traces have the times of steps"
_SCALING = "start or drain workers instead; the scheduler uses those that are there"

UNSUPPORTED = {
    "/v1/embeddings": _POOLING,
    "/v2/embed": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/score": _POOLING,
    "/v1/score": _POOLING,
    "/rerank": _POOLING,
    "/v1/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/generative_scoring": "use /v1/completions with `echo`, `logprobs` and `max_tokens: 0`",
    "/v1/audio/transcriptions": "models that take audio are not served",
    "/v1/audio/translations": "models that take audio are not served",
    "/v1/realtime": "models that take audio are not served",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/pause": _PAUSE,
    "/resume": _PAUSE,
    "/is_paused": _PAUSE,
    "/update_weights": _WEIGHTS,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/collective_rpc": "workers take no calls over HTTP; `pagewire status` shows their state",
    "/reset_prefix_cache": "the prefix cache cannot be emptied; it evicts unused blocks itself",
    "/reset_mm_cache": "models that take images or audio are not served",
    "/reset_encoder_cache": "models that take images or audio are not served",
    "/load": "/metrics has the requests that run and wait",
    "/server_info": "`pagewire status --json` has the state of the deployment",
    "/start_profile": _PROFILES,
    "/stop_profile": _PROFILES,
    "/abort_requests": "close a request's connection to end it, or call Abort over gRPC",
    "/invocations": "use /v1/chat/completions or /v1/completions",
    "/inference/v1/generate": "use /v1/completions with token ids as `prompt`",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/v1/chat/completions/batch": _BATCHES,
    "/v1/chat/completions/render": _RENDER,
    "/v1/completions/render": _RENDER,
    "/v1/batches": _BATCHES,
    "/v1/files": _BATCHES,
    "/v1/responses/{response_id}": _STORED,
    "/v1/responses/{response_id}/cancel": _STORED,
    "/v1/responses/{response_id}/input_items": _STORED,
    "/scale_elastic_ep": _SCALING,
    "/is_scaling_elastic_ep": _SCALING,
}
"""The second half of the error message, by path."""

METHODS = ["GET", "POST", "PUT", "DELETE"]


def make_router(_: HttpServices) -> APIRouter:
    """Routes that answer 501."""
    router = APIRouter(include_in_schema=False)
    for path, instead in UNSUPPORTED.items():
        router.add_api_route(path, _refuse(path, instead), methods=METHODS, response_model=None)
    return router


def _refuse(path: str, instead: str) -> Callable[[Principal], Awaitable[Never]]:
    async def refuse(caller: Caller) -> Never:
        # Clients of OpenAI and Anthropic try any code from 500 again unless a header says no.
        raise HTTPException(501, f"{path} is not supported: {instead}", {"x-should-retry": "false"})

    return refuse
