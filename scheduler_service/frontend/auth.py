"""Authentication: the tenant of a call and its permissions, from the call's credentials.

gRPC and HTTP both pass the value of `authorization` (`Bearer KEY`) as the caller sent it, before
they read anything else of a call.

The file of API keys is TOML, a table `key` for each, as `pagewire key new` writes it:

    [[key]]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "production"
    models = ["llama-3-8b"]            # absent: all
    lora_modules = ["support"]         # absent: all adapters of its models
    expires = 2027-01-01T00:00:00Z     # absent: never
    operator = true                    # absent: false

The file holds only hashes. A plain hash is sufficient because keys have 256 random bits, which
cannot be enumerated. Keys are looked up by their hash; the time that a lookup takes reveals
something about the hash of a guess, which does not help to make a better guess.
"""

import hashlib
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scheduler_service.errors import PermissionDenied, Unauthenticated


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """The tenant of a call, and what its key permits."""

    name: str = ""
    """The tenant's name at the core: shares, limits and request ids are per name."""
    models: Collection[str] | None = None
    """Models it may use; None: all."""
    lora_modules: Collection[str] | None = None
    """Adapters it may use, of the models that it may use; None: all of them."""
    is_operator: bool = True
    """Whether it may see the deployment's state, which includes other tenants' requests."""

    def may_use(self, model: str) -> bool:
        """Whether it may use a model of this name, whether or not there is one."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied unless it may use a model of this name."""
        if not self.may_use(model):
            raise PermissionDenied(
                f"this API key may not use model {model!r}",
                reason="MODEL_NOT_ALLOWED",
                details={"model": model},
            )

    def may_use_lora(self, name: str, model: str) -> bool:
        """Whether it may use an adapter of this name of a model. An adapter's name among its models
        permits that adapter alone."""
        allowed = self.lora_modules is None or name in self.lora_modules
        return allowed and (self.may_use(model) or self.may_use(name))

    def check_lora(self, name: str, model: str) -> None:
        """Raise PermissionDenied unless it may use an adapter of this name of a model."""
        if not self.may_use_lora(name, model):
            raise PermissionDenied(
                f"this API key may not use adapter {name!r} of model {model!r}",
                reason="ADAPTER_NOT_ALLOWED",
                details={"lora": name, "model": model},
            )

    def check_operator(self) -> None:
        """Raise PermissionDenied unless it may see the deployment's state."""
        if not self.is_operator:
            raise PermissionDenied(
                "this API key may not see the deployment's state: it requires `operator = true`",
                reason="NOT_AN_OPERATOR",
            )


PRINCIPAL: ContextVar[Principal] = ContextVar("principal")
"""The authenticated caller of the gRPC call that is being served."""


class Authentication:
    """Identifies callers by their credentials; this one accepts every call as the same tenant's."""

    asks_for_key = False
    """Whether a caller must present a key."""

    def authenticate(self, authorization: str | None) -> Principal:
        """The tenant of a call with these credentials; None stands for a call without any.

        Raises Unauthenticated if they are missing, unknown or expired.
        """
        return Principal()


_BEARER = "bearer "


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """The tenant and the expiry of one key."""

    tenant: Principal
    expires: float | None = None
    """Unix time in seconds from which on the key is invalid; None: never."""


Keys: TypeAlias = Mapping[str, ApiKey]
"""Keys by the hexadecimal digits of their SHA-256."""


class ApiKeys(Authentication):
    """Authentication by keys."""

    asks_for_key = True

    def __init__(self, keys: Callable[[], Keys], clock: Callable[[], float] = time.time) -> None:
        """`keys` is called for every call, so that a changed file applies at once."""
        self._keys = keys
        self._clock = clock

    def authenticate(self, authorization: str | None) -> Principal:
        """The tenant of the key that a call presents; raises Unauthenticated."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated(
                "no API key: send `authorization: Bearer KEY` as header or metadata",
                reason="NO_API_KEY",
            )
        key = self._keys().get(hash_of(authorization[len(_BEARER) :].strip()))
        if key is None:
            raise Unauthenticated("unknown API key", reason="UNKNOWN_API_KEY")
        if key.expires is not None and self._clock() >= key.expires:
            raise Unauthenticated("the API key has expired", reason="EXPIRED_API_KEY")
        return key.tenant


def hash_of(key: str) -> str:
    """A key's hash, as the file holds it."""
    return hashlib.sha256(key.encode()).hexdigest()


def shared_keys(keys: Iterable[str]) -> Keys:
    """Keys for everything, with no tenants."""
    return {hash_of(key): ApiKey(tenant=Principal()) for key in keys}


class _Entry(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tenant: str = Field(pattern="^[A-Za-z0-9._-]{1,64}$")
    models: list[str] | None = None
    lora_modules: list[str] | None = None
    expires: datetime | date | None = None
    operator: bool = False

    def key(self) -> ApiKey:
        """The key. A date stands for its first moment; the default time zone is UTC."""
        expires = self.expires
        if expires is not None:
            if not isinstance(expires, datetime):
                expires = datetime.combine(expires, time_of_day())
            expires = expires if expires.tzinfo else expires.replace(tzinfo=UTC)
        return ApiKey(
            tenant=Principal(
                name=self.tenant,
                models=None if self.models is None else frozenset(self.models),
                lora_modules=None if self.lora_modules is None else frozenset(self.lora_modules),
                is_operator=self.operator,
            ),
            expires=None if expires is None else expires.timestamp(),
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: list[_Entry] = []


def read_keys(path: Path) -> Keys:
    """The file's keys, none if all were revoked. Raises ValueError that names the file, the key's
    number and its field."""
    try:
        entries = _File(**tomllib.loads(path.read_bytes().decode())).key
    except OSError as error:
        raise ValueError(f"api_keys: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"api_keys: {path} is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        # Not chained: that error quotes the file.
        raise ValueError(f"api_keys: {path}: {where}: {first['msg']}") from None
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(entries, start=1):
        if entry.sha256 in keys:
            raise ValueError(f"api_keys: {path}: key {number}: duplicate key")
        keys[entry.sha256] = entry.key()
    return keys
