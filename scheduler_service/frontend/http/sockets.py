"""Listening sockets of the HTTP server, bound before any of its libraries is imported."""

import errno
import socket

from service_common.addresses import split_host_port
from service_common.errors import CannotListen

BACKLOG = 2048
"""Connections that may wait to be accepted; the kernel's own limit may be lower."""


def bind(address: str, *, share_port: bool) -> list[socket.socket]:
    """Sockets that listen on every address of `HOST:PORT`; raises CannotListen, telling why.

    With `share_port` other processes of this user may listen there too, and the kernel spreads
    connections over them. With port 0 all have the port that the first was given.
    """
    host, port = split_host_port(address)
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, where in dict.fromkeys(found):
            chosen = bound[0].getsockname()[1] if bound else port
            if found_socket := _listen(family, (where[0], chosen, *where[2:]), share_port):
                bound.append(found_socket)
        if not bound:
            raise OSError("no address family of this host can be used")
    except OSError as error:
        for listening in bound:
            listening.close()
        why = (error.strerror or str(error)).lower()
        raise CannotListen(f"{address} for HTTP", f"{why}; --http chooses another") from error
    return bound


def address_of(sockets: list[socket.socket], asked: str) -> str:
    """`HOST:PORT` with the port in effect."""
    return f"{asked.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"


def _listen(family: int, where: tuple[object, ...], share_port: bool) -> socket.socket | None:
    """A listening socket, or None where the machine lacks the family (IPv6, often)."""
    try:
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    listening.setblocking(False)
    return listening
