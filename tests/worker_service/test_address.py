"""Addresses: their forms, and which one is sent to the core."""

import pytest

from worker_service.address import TcpAddress, UnixAddress, advertised, parse
from worker_service.errors import InvalidOption


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7620", TcpAddress("127.0.0.1", 7620)),
        ("worker-3.pool:0", TcpAddress("worker-3.pool", 0)),
        ("[::1]:80", TcpAddress("::1", 80)),
        ("unix:/run/w.sock", UnixAddress("/run/w.sock")),
        ("unix:w.sock", UnixAddress("w.sock")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: TcpAddress | UnixAddress) -> None:
    assert parse(text, "listen") == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "7620", ":7620", "host", "host:", "host:x", "::1:80", "unix:"]
)
def test_anything_else_is_refused_by_the_option_s_name(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"listen: .*expected"):
        parse(text, "listen")


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(InvalidOption):
        parse("host:65536", "listen")


def test_the_address_listened_on_is_advertised() -> None:
    for address in (UnixAddress("/w"), TcpAddress("10.1.2.3", 5)):
        assert advertised(address, TcpAddress("127.0.0.1", 1)) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_on_all_interfaces_the_one_towards_the_core_is_advertised(host: str) -> None:
    core = TcpAddress("127.0.0.1", 7610)
    assert advertised(TcpAddress(host, 7620), core) == TcpAddress("127.0.0.1", 7620)


@pytest.mark.parametrize("core", [None, UnixAddress("/core")])
def test_on_all_interfaces_loopback_is_advertised_to_a_core_on_this_machine(
    core: UnixAddress | None,
) -> None:
    assert advertised(TcpAddress("0.0.0.0", 7620), core) == TcpAddress("127.0.0.1", 7620)


def test_a_core_that_cannot_be_resolved_is_named() -> None:
    core = TcpAddress("no-such-host.invalid", 7610)
    with pytest.raises(InvalidOption, match=r"^no-such-host\.invalid cannot be resolved: "):
        advertised(TcpAddress("0.0.0.0", 7620), core)
