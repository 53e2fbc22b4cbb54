"""Who calls over HTTP. Credentials are looked at before anything else of a request is read."""

from collections.abc import Collection
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler_service.errors import Unauthenticated
from scheduler_service.frontend.authentication import Authentication, Tenant
from scheduler_service.frontend.http.errors import error_response
from service_common.metadata import authorization

OPEN_PATHS = ("/health", "/ping", "/openapi.json")
"""What anybody may ask for; it tells nothing about requests or tenants."""

_KEY = "pagewire.tenant"


class Authenticate:
    """Refuses callers without good credentials everywhere but at the open paths."""

    def __init__(
        self, app: ASGIApp, authentication: Authentication, open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._authentication = authentication
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                scope[_KEY] = self._authentication.tenant_of(_authorization(scope))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """As gRPC has it in its metadata: names in lower case, and text."""
    return authorization(
        (name.decode(), value.decode("latin-1")) for name, value in scope["headers"]
    )


def _tenant(request: Request) -> Tenant:
    tenant = request.scope[_KEY]
    assert isinstance(tenant, Tenant)
    return tenant


Caller = Annotated[Tenant, Depends(_tenant)]
"""An endpoint's parameter of this type is the tenant whose call it is."""
