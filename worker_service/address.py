"""A worker's addresses as host and port or path, and the address that it advertises."""

import socket
from dataclasses import dataclass

from service_common.addresses import UNIX, check_address, split_host_port, unix_path
from worker_service.errors import InvalidOption

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
        return f"{UNIX}{self.path}"


Address = TcpAddress | UnixAddress


def parse(text: str, option: str) -> Address:
    """The address in `text`. Raises InvalidOption, naming the option."""
    try:
        check_address(text)
    except ValueError as error:
        raise InvalidOption(f"{option}: {error}") from None
    if text.startswith(UNIX):
        return UnixAddress(unix_path(text))
    return TcpAddress(*split_host_port(text))


def advertised(listening: Address, core: Address | None) -> Address:
    """The address to advertise, from the one listened on.

    A wildcard address is replaced by that of the interface on the route to the core.
    """
    if isinstance(listening, UnixAddress) or listening.host not in _WILDCARDS:
        return listening
    if not isinstance(core, TcpAddress):
        return TcpAddress("127.0.0.1", listening.port)
    return TcpAddress(local_host_towards(core), listening.port)


def local_host_towards(peer: TcpAddress) -> str:
    """This host's address on the route to a peer; sends nothing.

    Raises InvalidOption if the peer's name cannot be resolved, or if there is no route to it.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            peer.host, peer.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            host: str = probe.getsockname()[0]
            return host
    except socket.gaierror as error:
        raise InvalidOption(f"{peer.host} cannot be resolved: {error.strerror or error}") from None
    except OSError as error:
        reason = f"no route to the core at {peer}: {error.strerror or error}"
        raise InvalidOption(f"advertise: expected an address, since there is {reason}") from None
