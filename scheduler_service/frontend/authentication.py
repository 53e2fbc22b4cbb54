"""Who calls: from the credentials of a call to the tenant that it is for.

gRPC and HTTP ask the same question, with the value of `authorization` (`Bearer KEY`) as the caller
sent it, before they read anything else of a call.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from scheduler_service.errors import PermissionDenied


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """Whose call it is, and what its key is good for."""

    name: str = ""
    """What the core knows it as: shares, limits and request ids go by it."""
    models: Collection[str] | None = None
    """Models it may use; None: all."""
    is_operator: bool = True
    """Whether it may see the deployment's state, which shows what other tenants do."""

    def may_use(self, model: str) -> bool:
        """Whether it may use a model of this name, whether or not there is one."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied unless it may use a model of this name."""
        if not self.may_use(model):
            raise PermissionDenied(
                f"this key is not good for the model {model!r}",
                reason="MODEL_NOT_ALLOWED",
                details={"model": model},
            )

    def check_operator(self) -> None:
        """Raise PermissionDenied unless it may see the deployment's state."""
        if not self.is_operator:
            raise PermissionDenied(
                "this key is not an operator's: it cannot see the deployment's state",
                reason="NOT_AN_OPERATOR",
            )


class Authentication(Protocol):
    """Knows callers by their credentials."""

    asks_for_key: bool
    """Whether a caller must bring a key."""

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Whose call it is that brings this; None: a call that brings nothing.

        Raises Unauthenticated unless the credentials are there, known and in force.
        """


class NoAuthentication:
    """Everybody may call, and everything is one tenant's."""

    asks_for_key = False

    def __init__(self) -> None:
        self._everybody = Tenant()

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The one tenant, whatever is brought."""
        return self._everybody
