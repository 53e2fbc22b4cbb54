"""Workers that move blocks between each other, and one that reaches none."""

from typing import Any

from pagewire.columns import pack
from pagewire.v1 import plan_pb2
from worker_service.block_transfer.transfers import Peers, Transfers
from worker_service.block_transfer.transport import FetchFailed, Parts, ReadRequest
from worker_service.plan import FetchFailure

TOKEN = bytes(range(16))


def _refuse(address: str, request: ReadRequest, timeout_s: float) -> Parts:
    raise FetchFailed(FetchFailure.UNREACHABLE, "made up")


NO_PEERS = Peers(connect=_refuse)


def no_transfers() -> Transfers:
    """Those of a model without blocks."""
    return Transfers(None, NO_PEERS)


def keys_of(count: int, first: int = 1) -> bytes:
    """The keys of some blocks, all different."""
    return b"".join(number.to_bytes(16, "big") for number in range(first, first + count))


def lease(blocks: list[int], **fields: Any) -> plan_pb2.BlockLease:
    """Lease 1 of some blocks."""
    values = {"lease_id": 1, "token": TOKEN, "keys": keys_of(len(blocks)), "timeout_ms": 60_000}
    return plan_pb2.BlockLease(block_ids=pack(blocks), **values | fields)


def fetch(address: str, pairs: list[tuple[int, int]], **fields: Any) -> plan_pb2.BlockFetch:
    """Fetch 1 of some blocks of lease 1, of epoch 1."""
    values: dict[str, Any] = {
        "fetch_id": 1,
        "blocks": pack([block for pair in pairs for block in pair]),
        "addresses": [address],
        "source_epoch": 1,
        "lease_id": 1,
        "token": TOKEN,
        "keys": keys_of(len(pairs)),
        "timeout_ms": 60_000,
    }
    return plan_pb2.BlockFetch(**values | fields)
