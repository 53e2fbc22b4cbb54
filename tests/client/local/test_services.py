"""What a local deployment refuses before anything is started."""

import pytest

from pagewire_cli.local import LocalServices


@pytest.mark.parametrize("port", ["abc", "127.0.0.1:", "0", "65536", "²"])
def test_what_is_no_port_for_metrics_is_named(port: str) -> None:
    with pytest.raises(ValueError, match="metrics_port: expected PORT or HOST:PORT from 1"):
        LocalServices("embedded", engine_flags={"simulate": True}, metrics_port=port)
