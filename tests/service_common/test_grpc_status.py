"""The statuses that callers receive for errors, if they are still connected."""

import asyncio

import grpc
import pytest

from service_common.errors import Unauthenticated
from service_common.grpc_status import COMMON, cancel_if_ended


class GoneContext:
    """Of a call whose caller has gone."""

    async def abort(self, *_: object, **__: object) -> None:
        raise grpc.aio.InternalError("the call is over")


async def test_a_call_that_is_over_is_cancelled_rather_than_failed() -> None:
    with pytest.raises(asyncio.CancelledError):
        await COMMON.abort(GoneContext(), Unauthenticated("no key"))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError), cancel_if_ended():
        raise grpc.aio.InternalError("the call is over")


async def test_a_call_is_not_cancelled_by_the_end_of_what_it_waits_for() -> None:
    """gRPC gives a call no status whose handler raises CancelledError."""
    other = asyncio.get_running_loop().create_future()
    other.cancel()
    with pytest.raises(RuntimeError, match="has been cancelled"), cancel_if_ended():
        await other


async def test_the_cancellation_of_a_call_stays_one() -> None:
    async def serve() -> None:
        with cancel_if_ended():
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()


def test_what_is_wrong_otherwise_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), cancel_if_ended():
        raise ZeroDivisionError


def test_the_error_of_a_write_to_a_call_that_is_over_is_the_one_that_is_looked_for() -> None:
    """gRPC documents neither it nor its place."""
    assert issubclass(grpc._cython.cygrpc.ExecuteBatchError, grpc.aio.InternalError)
