"""A fake frontend, and both kinds of client to call it with."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from pagewire_client import RetryPolicy
from tests.support.client_facade import CLIENTS
from tests.support.fake_frontend import FakeFrontend

FAST_RETRY = RetryPolicy(initial_backoff_s=0.01, max_backoff_s=0.05, recovery_timeout_s=60.0)

MakeClient = Callable[..., Any]


@pytest.fixture
def frontend() -> Iterator[FakeFrontend]:
    with FakeFrontend() as server:
        yield server


@pytest.fixture(params=CLIENTS)
def make_client(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    """Makes a client of either kind, with a blocking interface, closed after the test."""
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Any:
            client = CLIENTS[request.param](*args, **({"retry": FAST_RETRY} | kwargs))
            return stack.enter_context(closing(client))

        yield make


@pytest.fixture
def client(make_client: MakeClient, frontend: FakeFrontend) -> Any:
    """A client of the fake frontend."""
    return make_client(frontend.address)
