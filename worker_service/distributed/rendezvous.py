"""Rendezvous of the ranks of a group.

Rank 0 hosts a small store at a fixed address for as long as it lives. For every epoch the ranks
meet there under the epoch's number, so that a group can start again with a replaced rank while the
others keep their weights.
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
"""For connections to rank 0's store, and among ranks that have met: one may be lost meanwhile."""

_MEET_TIMEOUT_S = 60.0
_POLL_S = 0.01
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longer than any step, since a rank waits for the others' parts of it."""


class Rendezvous:
    """Access to the group's store, which rank 0 hosts unless torchrun does."""

    def __init__(self, address: TcpAddress, layout: Layout) -> None:
        self._address = address
        self._layout = layout
        self._server: Any = None

    def open(self) -> None:
        """Start the store on rank 0. Raises CannotListen."""
        if self._layout.rank != 0 or _is_store_of_torchrun():
            return
        try:
            self._server = TCPStore(
                self._address.host, self._address.port, is_master=True, wait_for_workers=False
            )
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise CannotListen(f"{self._address} for the group's store", why) from None

    def meet(self, epoch: int, cancelled: threading.Event) -> "EpochRendezvous":
        """The rendezvous of an epoch. Raises GroupBroken if rank 0 cannot be reached.

        cancelled: see `EpochRendezvous`; may be set while this connects to rank 0.
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
            raise GroupBroken(f"no store of rank 0 at {self._address}") from None
        return PrefixStore(prefix, store)


class EpochRendezvous:
    """The rendezvous of one epoch."""

    def __init__(
        self, store: Any, layout: Layout, local_host: str, cancelled: threading.Event
    ) -> None:
        self.cancelled = cancelled
        """Set on any thread to interrupt this rank's waits, present and future."""
        self._store = store
        self._layout = layout
        self._local_host = local_host

    def wait_for_all(self) -> None:
        """Return once every rank has arrived. Raises GroupBroken."""
        names = [f"rank-{rank}" for rank in range(self._layout.world_size)]
        until = time.monotonic() + _MEET_TIMEOUT_S
        try:
            self._store.set(names[self._layout.rank], "here")
            while not self._store.check(names):
                if self.cancelled.is_set() or time.monotonic() > until:
                    raise GroupBroken("not all ranks of the group have joined")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise GroupBroken(f"lost rank 0: {str(error).splitlines()[0]}") from None

    def process_group(self, name: str, ranks: Sequence[int]) -> Any:
        """A gloo group of some ranks, including this one. Raises GroupBroken."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._gloo_device()]
        options._timeout = _CONNECT_TIMEOUT
        options._threads = 1
        group = self._make(ProcessGroupGloo, name, ranks, options)
        group._set_default_timeout(_COLLECTIVE_TIMEOUT)
        return group

    def device_process_group(self, name: str, ranks: Sequence[int]) -> Any:
        """An NCCL group of some ranks, including this one, which connect when it is first used."""
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
            raise GroupBroken(f"cannot create process group {name!r}: {reason}") from None

    def _gloo_device(self) -> Any:
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            return ProcessGroupGloo.create_default_device()
        return ProcessGroupGloo.create_device(hostname=self._local_host)


def survive_lost_peers(environment: MutableMapping[str, str]) -> None:
    """Make torch raise NCCL errors, unless the environment says otherwise. By default it ends the
    process of a rank that detects the loss of another, and so loses its weights."""
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def _is_store_of_torchrun() -> bool:
    """Whether torchrun's agent hosts the store, at the address that it gives to its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
