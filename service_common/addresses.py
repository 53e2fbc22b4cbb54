"""Addresses to listen on: `HOST:PORT` (an IPv6 host in brackets) or `unix:PATH`.

gRPC does not explain why it cannot listen, takes over a unix socket that another process uses, and
parses a malformed address as a host name. Therefore addresses are checked here first.
"""

import errno
import ipaddress
import os
import socket
import stat

from service_common.errors import CannotListen

UNIX = "unix:"
MAX_UNIX_PATH_BYTES = 107


def check_address(address: str) -> None:
    """Raise ValueError unless `address` is well formed."""
    if address.startswith(UNIX):
        length = len(unix_path(address).encode())
        if not 1 <= length <= MAX_UNIX_PATH_BYTES:
            raise ValueError(
                f"{address!r}: expected a path of 1 to {MAX_UNIX_PATH_BYTES} bytes, got {length}"
            )
    else:
        split_host_port(address)


def check_addresses(**addresses: str | None) -> None:
    """Raise ValueError that names the first malformed address; None is allowed."""
    for name, address in addresses.items():
        try:
            if address is not None:
                check_address(address)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def unix_path(address: str) -> str:
    """The path of `unix:PATH` or `unix:///PATH`."""
    return address.removeprefix(UNIX).removeprefix("//")


def split_host_port(address: str) -> tuple[str, int]:
    """Host without brackets, and port; raises ValueError."""
    host, colon, port = address.rpartition(":")
    well_formed = host and port.isascii() and port.isdecimal() and int(port) <= 65535
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        well_formed = False
    if not colon or not well_formed:
        raise ValueError(f"expected HOST:PORT or unix:PATH, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_local(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    if address.startswith(UNIX):
        return True
    host, _ = split_host_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ensure_free(address: str) -> None:
    """Raise CannotListen with the reason unless a server can listen on `address` now."""
    try:
        check_address(address)
        if address.startswith(UNIX):
            _ensure_free_unix(address)
        else:
            _ensure_free_tcp(address)
    except OSError as error:
        raise CannotListen(address, (error.strerror or str(error)).lower()) from error
    except ValueError as error:
        raise CannotListen(address, str(error)) from error


def _ensure_free_tcp(address: str) -> None:
    """Bind every address of the host briefly; one family may be missing, none may be in use."""
    host, port = split_host_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failures = []
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            failures.append(error)
    if len(failures) == len(found):
        raise failures[0]


def _ensure_free_unix(address: str) -> None:
    """Accept a socket file that no process listens on; gRPC replaces it."""
    path = unix_path(address)
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise CannotListen(address, "the file exists and is not a socket")
    except FileNotFoundError:
        os.stat(os.path.dirname(os.path.abspath(path)))
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except BlockingIOError:  # a process that does not accept: its backlog is full
            pass
    raise CannotListen(address, "address already in use")
