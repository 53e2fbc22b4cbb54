"""Endpoints of other servers (vLLM, OpenAI, Ollama, TGI) that this one lacks: 501 and what to do
instead, by path."""

from collections.abc import Awaitable, Callable
from typing import Never

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.http.middleware import Caller

_PATHS_BY_ADVICE = {
    "use /v1/completions with `echo`, `logprobs` and `max_tokens: 0`": ("/generative_scoring",),
    "models that take audio are not served": (
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"),
    ),
    "models that take images or audio are not served": ("/reset_mm_cache", "/reset_encoder_cache"),
    "a worker cannot sleep; `pagewire drain` ends one without losing its requests": (
        *("/sleep", "/wake_up", "/is_sleeping"),
    ),
    "the service cannot be paused; `pagewire drain` empties a worker, and SIGTERM a frontend": (
        *("/pause", "/resume", "/is_paused"),
    ),
    "weights cannot be changed at run time; start workers with the new model and drain the old": (
        *("/update_weights", "/init_weight_transfer_engine"),
    ),
    "workers take no calls over HTTP; `pagewire status` shows their state": ("/collective_rpc",),
    "the prefix cache cannot be emptied; it evicts unused blocks itself": ("/reset_prefix_cache",),
    "`pagewire status` and /metrics of the core have the requests that run and wait": ("/load",),
    "`pagewire status --json` has the state of the deployment": ("/server_info",),
    "profiles are not taken over HTTP; /metrics and traces have the times of steps": (
        *("/start_profile", "/stop_profile"),
    ),
    "close a request's connection to end it, or call Abort over gRPC": ("/abort_requests",),
    "use /v1/chat/completions or /v1/completions": ("/invocations",),
    "use /v1/completions with token ids as `prompt`": ("/inference/v1/generate",),
    "use /v1/chat/completions": ("/cohere/v2/chat", "/api/chat"),
    "use /v1/completions": ("/generate", "/generate_stream", "/api/generate"),
    "use /v1/models": ("/api/tags",),
    "use /v1/responses or /v1/chat/completions": ("/v1/assistants", "/v1/threads"),
    "only models that generate text are served": (
        *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
        *("/v1/audio/speech", "/v1/videos", "/v1/moderations"),
    ),
    "models are not trained": ("/v1/fine_tuning/jobs",),
    "batches are not stored; send the requests at once, they are batched as they run": (
        *("/v1/chat/completions/batch", "/v1/batches", "/v1/files"),
    ),
    "conversations are not rendered to text; /tokenize with `messages` returns their token ids": (
        *("/v1/chat/completions/render", "/v1/completions/render"),
    ),
    "responses are not stored; send the whole conversation as `input` each time": (
        *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        "/v1/responses/{response_id}/input_items",
    ),
    "start or drain workers instead; the scheduler uses those that are there": (
        *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
    ),
}

UNSUPPORTED = {path: advice for advice, paths in _PATHS_BY_ADVICE.items() for path in paths}
"""The second half of the error message, by path."""

METHODS = ["GET", "POST", "PUT", "DELETE"]


def _refuse(path: str, advice: str) -> Callable[[Principal], Awaitable[Never]]:
    async def refuse(caller: Caller) -> Never:
        # Clients of OpenAI and Anthropic try any code from 500 again unless a header says no.
        raise HTTPException(501, f"{path} is not supported: {advice}", {"x-should-retry": "false"})

    return refuse


router = APIRouter(include_in_schema=False)
for _path, _advice in UNSUPPORTED.items():
    router.add_api_route(_path, _refuse(_path, _advice), methods=METHODS, response_model=None)
