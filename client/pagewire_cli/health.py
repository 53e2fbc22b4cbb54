"""`pagewire health`: whether one service serves.

Containers are checked by it every few seconds, so it imports neither the other commands nor typer:
most of its CPU time is the import of grpc.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pagewire_cli.local.health import refusal_to_serve
from pagewire_client.connection import DEFAULT_ADDRESS, TlsOptions, check_address

_TRUE = ("1", "true", "t", "yes", "y", "on")

TEXT = "Check whether a service can serve requests: exit code 0 if so, 1 if not."


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(arguments)
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    try:
        address = options.address or _usual_address()
        check_address(address)
        tls = TlsOptions.of(*files, is_on=options.tls)
        reason = refusal_to_serve(address, options.timeout, options.service, tls)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    # The exit code is the answer, whether or not anyone reads the text.
    try:
        sys.stdout.write("serving\n" if reason is None else f"not serving: {reason}\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would fail again at its end
    return 0 if reason is None else 1


def _usual_address() -> str:
    """The address for all commands. Raises ValueError if there are several."""
    named = os.environ.get("PAGEWIRE_ADDRESS", "").replace(",", " ").split()
    if len(named) > 1:
        raise ValueError(f"ADDRESS: expected one of PAGEWIRE_ADDRESS, {' or '.join(named)}")
    return named[0] if named else DEFAULT_ADDRESS


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return seconds


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = _Parser(prog="pagewire health", description=TEXT)
    parser.add_argument(
        "address",
        nargs="?",
        help="HOST:PORT or unix:PATH of any service; variable: PAGEWIRE_ADDRESS; default:"
        f" {DEFAULT_ADDRESS}",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=3.0, help="seconds to wait for an answer; default: 3"
    )
    parser.add_argument(
        "--service", default="", help="a gRPC service, or liveness for whether the process responds"
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        default=os.environ.get("PAGEWIRE_TLS", "").lower() in _TRUE,
        help="use TLS; variable: PAGEWIRE_TLS",
    )
    for name, what in (
        ("ca", "certificates (PEM) that may sign the server's"),
        ("cert", "this client's certificate (PEM)"),
        ("key", "that certificate's key (PEM)"),
    ):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=what)
    return parser
