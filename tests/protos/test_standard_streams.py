"""A process may be started with standard streams that are closed."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, socket, sys
from pagewire.standard_streams import open_standard_streams
open_standard_streams()
sys.stdout.write("out"), sys.stderr.write("err")
sys.stdout.flush(), sys.stderr.flush()
kept = socket.socket()
assert kept.fileno() > 2
assert os.path.samestat(os.fstat(CLOSED), os.stat(os.devnull))
"""


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_nothing_else_gets_the_descriptor_of_a_closed_stream(closed: int) -> None:
    program = PROGRAM.replace("CLOSED", str(closed))
    close = f'exec {closed}>&-; exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", close, "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "" if closed == 1 else "out",
        "" if closed == 2 else "err",
    )
