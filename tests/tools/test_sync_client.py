"""The blocking client is the one that is generated from the asyncio client."""

import pytest

from tools.sync_client import MODULES, PACKAGE, blocking


@pytest.mark.parametrize("name", MODULES)
def test_the_blocking_module_is_up_to_date(name: str) -> None:
    assert (PACKAGE / f"{name}.py").read_text() == blocking(name), "run `make sync-client`"
