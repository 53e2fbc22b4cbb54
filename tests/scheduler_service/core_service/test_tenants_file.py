"""The file of tenants' weights and limits."""

from pathlib import Path

import pytest

from scheduler_service.core.config import TenantConfig
from scheduler_service.core_service.config import TenantsFile, read_tenants

EXAMPLE = Path(__file__).parents[3] / "deploy" / "tenants.toml"


def read(folder: Path, text: str) -> TenantsFile:
    path = folder / "tenants.toml"
    path.write_text(text)
    return read_tenants(path)


def test_named_tenants_take_over_what_they_leave_out_from_the_default(tmp_path: Path) -> None:
    tenants = read(
        tmp_path,
        "[default]\nmax_requests = 8\n[tenants.acme]\nweight = 2.5\n[tenants.'b c']\n"
        "max_requests = 9\nmax_queued_tokens = 100\nmax_kv_blocks = 7\n",
    )
    assert tenants.default == TenantConfig(max_requests=8)
    assert tenants.named == {
        "acme": TenantConfig(weight=2.5, max_requests=8),
        "b c": TenantConfig(max_requests=9, max_queued_tokens=100, max_kv_blocks=7),
    }


def test_an_empty_file_limits_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "") == TenantsFile()


def test_the_example_is_right() -> None:
    tenants = read_tenants(EXAMPLE)
    assert tenants.default.max_requests is not None
    assert len({tenant.weight for tenant in tenants.named.values()}) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default", "is not TOML"),
        ("[other]\n", "other: expected only default and tenants.NAME"),
        ("tenants = 3\n", "tenants: expected tables tenants.NAME"),
        ("[tenants]\nacme = 3\n", "tenants.acme: expected a table"),
        ("[tenants.acme]\nwieght = 2\n", "tenants.acme.wieght: unknown; there are: weight, max_re"),
        ("[tenants.acme]\nweight = 0\n", "tenants.acme: weight: expected a number above 0, got 0"),
        (
            "[tenants.acme]\nweight = nan\n",
            "tenants.acme: weight: expected a number above 0, got nan",
        ),
        ("[tenants.acme]\nweight = '2'\n", "tenants.acme.weight: expected a number, got '2'"),
        ("[default]\nmax_requests = 1.5\n", "default.max_requests: expected a whole number"),
        ("[default]\nmax_requests = true\n", "default.max_requests: expected a whole number"),
        ("[default]\nmax_kv_blocks = 0\n", "default: max_kv_blocks: expected at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_named_with_file_tenant_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match="tenants: ") as caught:
        read(tmp_path, text)
    assert str(tmp_path / "tenants.toml") in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.toml: No such file"):
        read_tenants(tmp_path / "none.toml")
