"""How a case fails or is skipped."""

from typing import NoReturn


class Failed(Exception):
    """The worker broke the promise; the message has the expected and the actual value."""


class Skipped(Exception):
    """The worker lacks an optional feature, which the message names."""


def fail(what: str) -> NoReturn:
    """The worker broke the promise."""
    raise Failed(what)


def expect(what: str, got: object, wanted: object) -> None:
    """Fail unless `got` equals `wanted`."""
    if got != wanted:
        fail(f"{what}: expected {wanted}, got {got}")


def expect_true(condition: bool, what: str) -> None:
    """Fail with the message `what` unless the condition holds."""
    if not condition:
        fail(what)
