"""What a local deployment refuses before anything is started."""

from typing import Any

import pytest

from pagewire_cli.local import LocalServices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": ""}, "model: expected a directory, file, hub id or embedded, got no text"),
        ({"num_workers": 0}, "num_workers: expected 1 to 1024, got 0"),
        ({"num_workers": 10**8}, "num_workers: expected 1 to 1024, got 100000000"),
        ({"num_frontends": -1}, "num_frontends: expected 1 to 1024, got -1"),
        (
            {"engine_flags": {"grace_period": float("nan")}},
            "grace_period: expected a number, got nan",
        ),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        LocalServices(**{"model": "embedded", **arguments})


@pytest.mark.parametrize("port", ["abc", "127.0.0.1:", "0", "65536", "²"])
def test_what_is_no_port_for_metrics_is_named(port: str) -> None:
    with pytest.raises(ValueError, match="metrics_port: expected PORT or HOST:PORT from 1"):
        LocalServices("embedded", engine_flags={"simulate": True}, metrics_port=port)
