"""Endpoints of other servers (vLLM, OpenAI, Ollama, TGI) that this one lacks: 501 and what to do
instead, by path."""

import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Never

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.http.middleware import Caller

_PATHS_BY_ADVICE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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
