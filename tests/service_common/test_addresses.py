"""An address that cannot be listened on is reported before gRPC's unclear message."""

import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from service_common.addresses import check_address, ensure_free
from service_common.errors import CannotListen


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:7610", "localhost:0", "[::1]:7610", "scheduler:65535", "unix:/tmp/x", "unix:///x"],
)
def test_a_well_formed_address_passes(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "7610",
        "host",
        "host:",
        ":7610",
        "host:port",
        "host:65536",
        "::1:7610",
        "host:-1",
        "unix:",
    ],
)
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        check_address(address)


def test_a_path_too_long_for_a_unix_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        check_address("unix:/" + "x" * 107)


def test_a_taken_port_is_told_as_such() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen) as error:
            ensure_free(address)
    assert str(error.value) == f"cannot listen on {address}: address already in use"
    ensure_free(address)


def test_an_address_of_another_machine_is_told_as_such() -> None:
    with pytest.raises(CannotListen, match="cannot assign requested address"):
        ensure_free("192.0.2.1:7610")


def test_a_unix_socket_in_use_is_told_and_one_left_behind_is_free(tmp_path: Path) -> None:
    path = tmp_path / "core.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(CannotListen, match="address already in use"):
            ensure_free(f"unix:{path}")
    ensure_free(f"unix:{path}")


@pytest.mark.timeout(20)
def test_a_unix_socket_is_in_use_though_its_process_accepts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "core.sock"
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(path))
        listening.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(str(path))
        with pytest.raises(CannotListen, match="address already in use"):
            ensure_free(f"unix:{path}")


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(CannotListen, match="is not a socket"):
        ensure_free(f"unix:{path}")
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match="no such file or directory"):
        ensure_free(f"unix:{tmp_path}/nowhere/core.sock")
