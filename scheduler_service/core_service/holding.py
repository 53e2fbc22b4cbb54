"""How long news for one frontend may wait, so that more go with them in one message."""

from scheduler_service.core.engine_outputs import EngineOutputs


class Holding:
    """The frontend's live requests, and how long each lets its tokens wait.

    Tokens wait as long as the least patient request allows. Whatever else there is to tell is told
    at once, and takes the tokens with it.
    """

    def __init__(self) -> None:
        self._holds_s: dict[int, float] = {}
        """By the request's handle."""
        self._shortest_s: float | None = None
        """Of all; None when it is to be found anew."""

    def __len__(self) -> int:
        """Requests that are live."""
        return len(self._holds_s)

    def begin(self, handle: int, hold_s: float) -> None:
        """A request was taken in."""
        self._holds_s[handle] = hold_s
        self._shortest_s = None

    def end(self, handle: int) -> None:
        """A request is no more, if it ever was."""
        if self._holds_s.pop(handle, None) is not None:
            self._shortest_s = None

    def delay_s(self, news: EngineOutputs) -> float:
        """How long `news` may wait; takes note of the requests whose end they tell."""
        for finished in news.requests_finished:
            self.end(finished.handle)
        for handle, _ in news.requests_failed:
            self.end(handle)
        if news.has_more_than_tokens:
            return 0.0
        if self._shortest_s is None:
            self._shortest_s = min(self._holds_s.values(), default=0.0)
        return self._shortest_s
