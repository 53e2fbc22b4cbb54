"""The client's span, from the headers of a call to where its request begins."""

from starlette.types import ASGIApp, Receive, Scope, Send

from service_common.metadata import TRACEPARENT


class TraceContext:
    """Keeps `traceparent` for what the call leads to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = (value for name, value in scope["headers"] if name == b"traceparent")
            TRACEPARENT.set(next((value.decode("latin-1") for value in found), None))
        await self._app(scope, receive, send)
