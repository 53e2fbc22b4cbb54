"""Where the ranks of a group find each other.

Rank 0 keeps a small store, at one address, for as long as it lives. Every epoch the ranks meet
there under the epoch's number, so that a group whose lost rank has come back begins afresh while
the others keep their weights.
"""

import os
import threading
import time
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from service_common.errors import CannotListen
from worker_service.address import TcpAddress, local_host_towards
from worker_service.distributed.layout import Layout
from worker_service.errors import GroupBroken

_CONNECT_TIMEOUT = timedelta(seconds=10)
_MEET_TIMEOUT_S = 60.0
_POLL_S = 0.01
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""More than any step takes: a rank waits for another's part of it."""


class Rendezvous:
    """A rank's way to the group's store. Rank 0 keeps the store, unless somebody else does."""

    def __init__(self, address: TcpAddress, layout: Layout) -> None:
        self._address = address
        self._layout = layout
        self._server: Any = None

    def open(self) -> None:
        """Keep the store, on rank 0. Raises CannotListen."""
        if self._layout.rank != 0 or _launcher_keeps_the_store():
            return
        try:
            self._server = TCPStore(
                self._address.host, self._address.port, is_master=True, wait_for_workers=False
            )
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise CannotListen(f"{self._address} for the group's store", why) from None

    def meet(self, epoch: int, cancelled: threading.Event) -> "EpochRendezvous":
        """The place where all ranks come for this epoch. Raises GroupBroken without rank 0.

        cancelled: see `Meeting`; may be set while this looks for rank 0.
        """
        local_host = local_host_towards(self._address)
        return EpochRendezvous(self._store(f"epoch-{epoch}"), self._layout, local_host, cancelled)

    def _store(self, prefix: str) -> Any:
        try:
            store = TCPStore(
                self._address.host,
                self._address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=_CONNECT_TIMEOUT,
            )
        except RuntimeError:
            raise GroupBroken(f"rank 0 keeps no store at {self._address}") from None
        return PrefixStore(prefix, store)


class EpochRendezvous:
    """The ranks of one epoch while they find each other."""

    def __init__(
        self, store: Any, layout: Layout, local_host: str, cancelled: threading.Event
    ) -> None:
        self.cancelled = cancelled
        """Set, from any thread, to have this rank give up, then or later."""
        self._store = store
        self._layout = layout
        self._local_host = local_host

    def wait_for_all(self) -> None:
        """Return once every rank is there. Raises GroupBroken."""
        names = [f"rank-{rank}" for rank in range(self._layout.world_size)]
        until = time.monotonic() + _MEET_TIMEOUT_S
        try:
            self._store.set(names[self._layout.rank], "here")
            while not self._store.check(names):
                if self.cancelled.is_set() or time.monotonic() > until:
                    raise GroupBroken("not all ranks of the group have come")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise GroupBroken(f"rank 0 is gone: {str(error).splitlines()[0]}") from None

    def process_group(self, name: str, ranks: Sequence[int]) -> Any:
        """A gloo group of some ranks, this one among them."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._gloo_device()]
        options._timeout = _COLLECTIVE_TIMEOUT
        options._threads = 1
        return self._make(ProcessGroupGloo, name, ranks, options)

    def device_process_group(self, name: str, ranks: Sequence[int]) -> Any:
        """An NCCL group of some ranks, this one among them."""
        survive_lost_peers(os.environ)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _COLLECTIVE_TIMEOUT
        return self._make(distributed.ProcessGroupNCCL, name, ranks, options)

    def _make(self, kind: Any, name: str, ranks: Sequence[int], options: Any) -> Any:
        store = PrefixStore(name, self._store)
        try:
            return kind(store, ranks.index(self._layout.rank), len(ranks), options)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise GroupBroken(f"the ranks could not be joined: {reason}") from None

    def _gloo_device(self) -> Any:
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            return ProcessGroupGloo.create_default_device()
        return ProcessGroupGloo.create_device(hostname=self._local_host)


def survive_lost_peers(environment: MutableMapping[str, str]) -> None:
    """Make torch leave errors of NCCL to us, unless the user says otherwise: by default it ends the
    process of a rank that notices that another is gone, and its weights with it."""
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def _launcher_keeps_the_store() -> bool:
    """torchrun's agent keeps one itself, at the address it gives its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
