"""A frontend's connection to the core."""

from typing import Any

from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from service_common.cluster import Cluster
from service_common.grpc_options import channel_options

CORE_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 32 << 10)]
"""Bytes the core may send ahead of what this process has read. Kept small, so that a frontend that
cannot keep up is not seconds behind: the core then merges several steps' news into one message, and
every client gets fewer and larger responses."""


class CoreConnection:
    """Called like a stub of `SchedulerService`, on one channel at a time.

    A channel keeps the certificates that it was made with; `renew` makes another for newer ones.
    """

    def __init__(self, cluster: Cluster, address: str) -> None:
        self._cluster = cluster
        self._address = address
        self._open()

    def _open(self) -> None:
        options = [*channel_options(), *CORE_WINDOW]
        self._credentials = self._cluster.channel_credentials()
        self._channel = self._cluster.channel(self._address, options)
        self._stub = self._cluster.stub(SchedulerServiceStub, self._channel)

    def __getattr__(self, rpc: str) -> Any:
        """A call of the stub in use."""
        return getattr(self._stub, rpc)

    async def renew(self) -> None:
        """If there are other certificates now, go on with a new channel; calls on the former one
        end."""
        if self._cluster.channel_credentials() is not self._credentials:
            former = self._channel
            self._open()
            await former.close()

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()
