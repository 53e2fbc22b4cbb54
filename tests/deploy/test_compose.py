"""docker-compose.yml is valid for Compose, and its commands for our programs."""

import json
import re
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from pagewire_cli.app import app as pagewire
from tests.support.compose import COMPOSE_FILE, ComposedService, services, started
from tests.support.own_commands import parsed, variables_of
from tools.launch import ROOT

NAMES = sorted(services())
OURS = sorted(name for name, service in services().items() if service.is_ours)
WORKERS = ("worker", "worker-cpu")
VENDORED = files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
SCHEMA = json.loads(VENDORED.read_text())
"""The Compose Specification's own, as a package of schemas brings it."""


def document() -> Any:
    return yaml.safe_load(COMPOSE_FILE.read_text())


def service_of(name: str) -> ComposedService:
    return services()[name]


def test_the_file_is_as_its_schema_says() -> None:
    jsonschema.validate(document(), SCHEMA)


def test_profiles_choose_the_workers() -> None:
    always = ["scheduler", "frontend"]
    assert list(started()) == [*always, "worker"]
    assert list(started("cpu")) == [*always, "worker-cpu"]
    assert list(started("cpu", "monitoring")) == [*always, "worker-cpu", "prometheus", "grafana"]
    assert list(started(variables={"COMPOSE_PROFILES": "cpu"})) == [*always, "worker-cpu"]


def test_the_environment_file_names_every_variable() -> None:
    named = set(re.findall(r"^#?(\w+)=", (ROOT / ".env").read_text(), re.MULTILINE))
    used = set(re.findall(r"\$\{(\w+)", COMPOSE_FILE.read_text()))
    assert named == used | {"COMPOSE_PROFILES"}


def test_only_user_facing_ports_are_published_and_only_on_loopback() -> None:
    published = {name: s.spec["ports"] for name, s in services().items() if "ports" in s.spec}
    assert published == {
        "frontend": ["127.0.0.1:7600:7600", "127.0.0.1:8000:8000"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_prometheus_scrapes_every_service_of_ours_at_its_metrics_port() -> None:
    """At its own port, by its service name, which Compose resolves to all replicas."""
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    asked = {
        (name, source["port"])
        for job in jobs["scrape_configs"]
        for source in job["dns_sd_configs"]
        for name in source["names"]
    }
    exported = {
        (name, int(_flag(service_of(name), "--metrics-port").split(":")[1])) for name in OURS
    }
    assert asked == exported
    assert all(_flag(service_of(name), "--metrics-port").startswith("0.0.0.0:") for name in OURS)


def test_the_monitors_read_the_files_of_the_checkout() -> None:
    for name in ("prometheus", "grafana"):
        assert service_of(name).spec["profiles"] == ["monitoring"]
        for volume in service_of(name).spec["volumes"]:
            source, *_, mode = volume.split(":")
            assert not source.startswith("./") or ((ROOT / source).is_dir() and mode == "ro")
    dashboards = ROOT / "deploy/grafana/provisioning/dashboards/pagewire.yml"
    (provider,) = yaml.safe_load(dashboards.read_text())["providers"]
    targets = [volume.split(":")[1] for volume in service_of("grafana").spec["volumes"]]
    assert provider["options"]["path"] in targets
    assert "./deploy/prometheus:/etc/prometheus:ro" in service_of("prometheus").spec["volumes"]


def test_grafana_has_no_account_with_a_known_password() -> None:
    settings = service_of("grafana").environment
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def _flag(service: ComposedService, name: str) -> str:
    return service.command[service.command.index(name) + 1]


@pytest.mark.parametrize("name", NAMES)
def test_it_may_do_no_more_than_it_needs(name: str) -> None:
    spec = service_of(name).spec
    assert spec["read_only"] is True
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]
    if name in OURS:
        assert spec["user"] == "10001:10001"
    assert not spec["user"].startswith("0")
    assert spec["restart"] == "unless-stopped"
    assert not {"privileged", "cap_add", "pid", "network_mode"} & set(spec)


@pytest.mark.parametrize("name", WORKERS)
def test_models_are_read_and_only_the_cache_is_written(name: str) -> None:
    volumes = service_of(name).spec["volumes"]
    assert volumes == ["./models:/models:ro", "cache:/home/pagewire/.cache"]
    assert "cache" in document()["volumes"]
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert "--owner=pagewire --group=pagewire /home/pagewire/.cache" in dockerfile


@pytest.mark.parametrize("name", OURS)
def test_its_command_line_is_one(name: str) -> None:
    """By our own parsers, with the service's variables and no others of ours."""
    service = service_of(name)
    options = parsed(service.command, service.environment)
    assert options["listen"].startswith("0.0.0.0:")
    if name != "scheduler":
        assert options["core"] == "scheduler:7610"
        assert "scheduler" in service.spec["depends_on"]
    assert service.stop_grace_s >= options["grace_period"] + 10


@pytest.mark.parametrize("name", OURS)
def test_its_health_check_asks_where_it_listens(name: str) -> None:
    service = service_of(name)
    port = _flag(service, "--listen").rpartition(":")[2]
    assert service.health_command[-1] == f"127.0.0.1:{port}"
    run = CliRunner().invoke(pagewire, [*service.health_command, "--help"])
    assert run.exit_code == 0, run.output


@pytest.mark.parametrize("name", OURS)
def test_its_image_is_built_here(name: str) -> None:
    spec = service_of(name).spec
    target = spec["build"]["target"]
    assert spec["image"].startswith(f"pagewire/{target}:")
    dockerfile = (ROOT / spec["build"]["dockerfile"]).read_text()
    assert re.search(rf"^FROM base AS {target}$", dockerfile, re.MULTILINE)


SECURE = yaml.safe_load((ROOT / "deploy/compose/secure.yml").read_text())


def test_the_secure_variant_is_as_its_schema_says_and_changes_every_service_of_ours() -> None:
    jsonschema.validate(SECURE, SCHEMA)
    assert sorted(SECURE["services"]) == OURS


@pytest.mark.parametrize("name", OURS)
def test_a_secret_is_read_by_a_flag_from_a_mounted_folder_where_it_can_be_replaced(
    name: str,
) -> None:
    added = SECURE["services"][name]
    assert all(mount["read_only"] for mount in added["volumes"])
    folders = {mount["target"] for mount in added["volumes"]}
    assert {str(PurePath(file).parent) for file in added["environment"].values()} == folders
    assert set(added["environment"]) <= variables_of(service_of(name).command[0])


def test_images_of_others_are_of_one_version() -> None:
    images = {service.spec["image"] for service in services().values() if not service.is_ours}
    assert [image for image in images if not re.search(r":v?\d+\.\d+\.\d+$", image)] == []
