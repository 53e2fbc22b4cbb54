"""A bound on what a request's body may hold, so that nobody fills our memory with one."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler_service.frontend.http.errors import too_large_response


class BodyLimit:
    """Answers 413 to longer bodies: at once where the length is told, else when it is reached."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _content_length(scope) > self._max_bytes:
            await too_large_response(self._max_bytes)(scope, receive, send)
            return
        body = _CountedBody(receive, self._max_bytes)

        async def send_unless_refused(message: Message) -> None:
            if not body.is_too_large:  # what is said of half a body is of no interest
                await send(message)

        await self._app(scope, body.receive, send_unless_refused)
        if body.is_too_large:
            await too_large_response(self._max_bytes)(scope, receive, send)


class _CountedBody:
    """Passes a body on until it is longer than it may be; then its reader sees it cut off."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._left = max_bytes
        self.is_too_large = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.is_too_large = True
                return {"type": "http.disconnect"}
        return message


def _content_length(scope: Scope) -> int:
    """As the client tells; 0 where it tells none, or no number."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
