"""Servers of gRPC within a test's process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc


@contextmanager
def grpc_server(
    add_servicers: Callable[[grpc.Server], None],
    credentials: grpc.ServerCredentials | None = None,
    num_threads: int = 1,
) -> Iterator[str]:
    """The address of a server, with TLS if it has credentials, that runs while the context
    lasts."""
    with ThreadPoolExecutor(num_threads) as pool:
        server = grpc.server(pool)
        add_servicers(server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()
