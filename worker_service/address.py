"""Addresses: `HOST:PORT` and `unix:PATH`."""

import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from worker_service.errors import CannotListen, InvalidOption

UNIX_PREFIX = "unix:"
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port, IPv6 without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A path of a unix socket."""

    path: str

    def __str__(self) -> str:
        return f"{UNIX_PREFIX}{self.path}"


Address = TcpAddress | UnixAddress


def parse(text: str, option: str) -> Address:
    """The address in `text`. Raises InvalidOption, naming the option."""
    if text.startswith(UNIX_PREFIX):
        path = text.removeprefix(UNIX_PREFIX).removeprefix("//")
        if path:
            return UnixAddress(path)
    else:
        host, colon, port = text.rpartition(":")
        is_bare_ipv6 = ":" in host and not host.startswith("[")
        if colon and host and not is_bare_ipv6 and port.isdecimal() and int(port) < 2**16:
            return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise InvalidOption(f"{option}: expected HOST:PORT or unix:PATH, got {text!r}")


def is_local(address: Address) -> bool:
    """Whether only this machine can reach an address."""
    if isinstance(address, UnixAddress):
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def check_free(address: Address) -> None:
    """Raises CannotListen, with the system's reason, if nobody could listen there now."""
    try:
        if isinstance(address, UnixAddress):
            _check_unix_free(address)
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address.host, address.port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CannotListen(f"cannot listen on {address}: {reason}") from None


def advertised(listening: Address, core: Address | None) -> Address:
    """The address to be reached at, from the one listened on.

    Listening on all interfaces names none: the one is taken that the route to the core leaves by.
    """
    if isinstance(listening, UnixAddress) or listening.host not in _WILDCARDS:
        return listening
    if not isinstance(core, TcpAddress):
        return TcpAddress("127.0.0.1", listening.port)
    return TcpAddress(local_host_towards(core), listening.port)


def local_host_towards(peer: TcpAddress) -> str:
    """Our own host address on the route to a peer; nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            peer.host, peer.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            host: str = probe.getsockname()[0]
            return host
    except OSError as error:
        reason = f"no route to the core at {peer}: {error.strerror or error}"
        raise InvalidOption(f"advertise: expected an address, since there is {reason}") from None


def _check_unix_free(address: UnixAddress) -> None:
    """A socket file that nobody listens on is left over from a killed process, and free."""
    path = Path(address.path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
