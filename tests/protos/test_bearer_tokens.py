"""Tokens are read alike by services, by the command line and by the conformance kit."""

import re
from pathlib import Path

import pytest

from conformance.credentials import Credentials
from pagewire.bearer_tokens import read_tokens
from pagewire_cli.options import Membership
from service_common.cluster import ClusterConfig


def test_a_file_has_one_token_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{'a' * 16}\r\n\n  {'~!' * 8}")
    assert read_tokens(path) == ["a" * 16, "~!" * 8]


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (None, "cannot read {}: No such file or directory"),
        (b" \n", "{}: expected a token, got an empty file"),
        ("schlüssel-1234567".encode(), "{}: expected visible ASCII characters"),
        (b"key-of-16-chars\x7f", "{}: expected visible ASCII characters"),
        (b"key-of-16-chars\x00", "{}: expected visible ASCII characters"),
    ],
)
def test_a_file_without_tokens_is_refused_by_name_wherever_it_is_read(
    contents: bytes | None, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    if contents is not None:
        path.write_bytes(contents)
    fault = fault.format(path)
    for read, expected in {
        lambda: read_tokens(path): fault,
        lambda: ClusterConfig(token_file=path): f"cluster_token_file: {fault}",
        lambda: Membership(cluster_token_file=path).connection_to("core:7610"): (
            f"--cluster-token-file: {fault}"
        ),
        lambda: Credentials(token_file=path).channel("core:7610"): fault,
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            read()
