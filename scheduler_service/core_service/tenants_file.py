"""The file that tells tenants' weights and limits.

TOML: a table `default` for every tenant that is not named, and a table `tenants.NAME` for each that
is; what a named one leaves out is as the default says. Keys are the fields of `TenantConfig`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from scheduler_service.core.config import TenantConfig

_KEYS = [config_field.name for config_field in fields(TenantConfig)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsFile:
    """What a file of tenants says."""

    default: TenantConfig = field(default_factory=TenantConfig)
    """What every tenant may have that is not named, each for itself."""

    named: Mapping[str, TenantConfig] = field(default_factory=dict)
    """What tenants may have, by name."""


NO_TENANTS = TenantsFile()


def read_tenants(path: Path) -> TenantsFile:
    """The file's contents. Raises ValueError that names file, tenant and key of what is wrong."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"tenants: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"tenants: {path} is not TOML: {error}") from error
    unknown = sorted(tables.keys() - {"default", "tenants"})
    if unknown:
        raise ValueError(f"tenants: {path}: {unknown[0]}: expected only default and tenants.NAME")
    named = tables.get("tenants", {})
    if not isinstance(named, dict):
        raise ValueError(f"tenants: {path}: tenants: expected tables tenants.NAME")
    default = _tenant(f"tenants: {path}: default", tables.get("default", {}), TenantConfig())
    return TenantsFile(
        default=default,
        named={
            name: _tenant(f"tenants: {path}: tenants.{name}", table, default)
            for name, table in named.items()
        },
    )


def _tenant(where: str, table: object, default: TenantConfig) -> TenantConfig:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: expected a table")
    for key, value in table.items():
        if key not in _KEYS:
            raise ValueError(f"{where}.{key}: unknown; there are: {', '.join(_KEYS)}")
        kinds = (int, float) if key == "weight" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            expected = "a number" if key == "weight" else "a whole number"
            raise ValueError(f"{where}.{key}: expected {expected}, is {value!r}")
    try:
        return replace(default, **table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
