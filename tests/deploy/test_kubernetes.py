"""The manifests are valid for Kubernetes, and their commands for our programs."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from scheduler_service.__main__ import make_app
from tests.support.manifests import (
    KUBERNETES,
    LEADER_WORKER_SET,
    OVERLAYS,
    Container,
    Manifest,
    containers,
    overlay,
    pod_template,
)
from tests.support.own_commands import parsed
from tools.launch import ROOT
from worker_service.__main__ import app as worker_app

VERSIONS = ("1.27", kubernetes_validate.latest_version())
"""The oldest version with stable gRPC probes, and the newest with a schema."""

SCHEMA = json.loads((Path(__file__).parent / "leaderworkerset.v1.json").read_text())


def validate(manifest: Manifest, version: str) -> None:
    """Raises jsonschema.ValidationError."""
    if manifest["kind"] != LEADER_WORKER_SET:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, SCHEMA)
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "template": pod_template(manifest)}
    kubernetes_validate.validate(pods, version, strict=True)


def all_containers() -> list[Any]:
    return [
        pytest.param(container, id=f"{name}-{container.name}")
        for name in OVERLAYS
        for container in containers(overlay(name))
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_object_is_as_its_schema_says(name: str, version: str) -> None:
    manifests = overlay(name)
    assert {m["kind"] for m in manifests} >= {"ConfigMap", "Deployment", "Service"}
    for manifest in manifests:
        validate(manifest, version)


@pytest.mark.parametrize("name", OVERLAYS)
def test_names_and_labels_agree(name: str) -> None:
    manifests = overlay(name)
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    assert all("namespace" not in m["metadata"] for m in manifests)
    labels = [
        template["metadata"]["labels"] for template in map(pod_template, manifests) if template
    ]
    for selector in filter(None, map(_selector, manifests)):
        if set(selector) == {"leaderworkerset.sigs.k8s.io/name"}:  # a label from its controller
            assert (LEADER_WORKER_SET, *selector.values()) in names
        else:
            assert any(selector.items() <= label.items() for label in labels)


def _selector(manifest: Manifest) -> dict[str, str] | None:
    """Labels of the pods that an object creates or selects."""
    if manifest["kind"] == "Service":
        return dict(manifest["spec"]["selector"])
    if manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
        return dict(manifest["spec"]["selector"]["matchLabels"])
    return None


@pytest.mark.parametrize("container", all_containers())
def test_its_command_line_is_one(container: Container) -> None:
    """By our own parsers, with the container's variables and no others of ours."""
    options = parsed(container.arguments, container.variables)
    assert options["listen"] == f"0.0.0.0:{container.ports['grpc']}"
    assert options.get("http", "off") == (
        f"0.0.0.0:{container.ports['http']}" if "http" in container.ports else "off"
    )
    assert not any("$(" in argument for argument in container.arguments), "something not set"
    if container.arguments[0] != "scheduler":
        assert options["core"] == "pagewire-core:7610"
    assert container.pod["terminationGracePeriodSeconds"] >= options["grace_period"] + 10


@pytest.mark.parametrize("container", all_containers())
def test_it_may_do_no_more_than_it_needs(container: Container) -> None:
    pod, own = container.pod, container.spec["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert f"--uid {pod['securityContext']['runAsUser']} pagewire" in dockerfile
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    # Services named pagewire-… would otherwise become variables that look like settings.
    assert pod["enableServiceLinks"] is False
    assert {"requests", "limits"} <= set(container.spec["resources"])
    mounts = {mount["name"] for mount in container.spec["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert container.variables["HOME"] == "/tmp", "the one place where it can write"


@pytest.mark.parametrize("container", all_containers())
def test_its_image_is_built_here(container: Container) -> None:
    image, _, tag = container.spec["image"].partition(":")
    target = image.removeprefix("pagewire/")
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert re.search(rf"^FROM \w+ AS {target}$", dockerfile, re.MULTILINE)
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    assert f"{image}:{tag}" in {service["image"] for service in composed}


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_lead_to_ports(name: str) -> None:
    manifests = overlay(name)
    by_labels = [
        (template["metadata"]["labels"], template["spec"]["containers"])
        for template in map(pod_template, manifests)
        if template
    ]
    services = [m for m in manifests if m["kind"] == "Service"]
    assert {s["metadata"]["name"] for s in services} == {"pagewire-core", "pagewire-frontend"}
    for service in services:
        selector = service["spec"]["selector"]
        (served,) = (own for labels, own in by_labels if selector.items() <= labels.items())
        for port in service["spec"]["ports"]:
            ports = {p["name"]: p["containerPort"] for p in served[0]["ports"]}
            assert ports[port["targetPort"]] == port["port"]


def test_a_core_can_be_reached_before_it_has_workers() -> None:
    """Workers connect through its Service, which routes to ready pods only."""
    (core,) = (c for c in containers(overlay("cpu")) if c.name == "core")
    assert {probe["service"] for _, probe in core.probes()} == {"liveness"}
    (deployment,) = (
        m
        for m in overlay("cpu")
        if m["metadata"]["name"] == "pagewire-core" and m["kind"] == "Deployment"
    )
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_gpu_workers_have_as_many_gpus_as_ranks() -> None:
    for name in ("gpu", "group"):
        (worker,) = (c for c in containers(overlay(name)) if c.name == "worker")
        command = typer.main.get_command(worker_app)
        params = command.make_context("worker", worker.arguments[1:]).params
        ranks = params["tensor_parallel_size"] * params["pipeline_parallel_size"]
        assert worker.spec["resources"]["limits"]["nvidia.com/gpu"] * params["num_nodes"] == ranks


def test_every_file_is_part_of_an_overlay() -> None:
    listed = {json.dumps(m, sort_keys=True) for name in OVERLAYS for m in overlay(name)}
    for file in KUBERNETES.rglob("*.yaml"):
        for manifest in yaml.safe_load_all(file.read_text()):
            if manifest["kind"] != "Kustomization":
                assert json.dumps(manifest, sort_keys=True) in listed, file


def metrics_ports(container: Container) -> dict[str, int]:
    return {name: port for name, port in container.ports.items() if name.startswith("metrics")}


@pytest.mark.parametrize("container", all_containers())
def test_each_of_its_processes_exports_metrics_at_a_declared_port(
    container: Container,
) -> None:
    role, *arguments = container.arguments
    if role != "worker":
        command = typer.main.get_command(make_app([role])).commands[role]  # type: ignore[attr-defined]
        (port,) = metrics_ports(container).values()
        assert command.make_context(role, arguments).params["metrics_port"] == f"0.0.0.0:{port}"
        return
    params = typer.main.get_command(worker_app).make_context(role, arguments).params
    num_ranks = params["tensor_parallel_size"] * params["pipeline_parallel_size"]
    own = num_ranks // params["num_nodes"]
    first = int(params["metrics_port"].removeprefix("0.0.0.0:"))
    assert list(metrics_ports(container).values()) == list(range(first, first + own))
    calls = range(container.port, container.port + own)
    assert not set(calls) & set(metrics_ports(container).values()), "ranks listen there"


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_prometheus_may_ask_for_metrics_from_outside(name: str) -> None:
    policies = [m["spec"] for m in overlay(name) if m["kind"] == "NetworkPolicy"]
    for container in containers(overlay(name)):
        component = {"core": "core", "frontend": "frontend", "worker": "worker"}[container.name]
        (policy,) = (p for p in policies if component in json.dumps(p["podSelector"]))
        for port in metrics_ports(container).values():
            assert _may_call(policy, port) == [{"app.kubernetes.io/name": "prometheus"}]
    (public,) = (p for p in policies if "frontend" in json.dumps(p["podSelector"]))
    assert public["ingress"][0] == {"ports": [{"port": 7600}, {"port": 8000}]}


def _may_call(policy: Manifest, port: int) -> list[dict[str, str]]:
    """Labels of the pods in other namespaces that may call a port."""
    return [
        peer["podSelector"]["matchLabels"]
        for rule in policy["ingress"]
        for peer in rule.get("from", [])
        if "namespaceSelector" in peer
        and any(
            allowed["port"] <= port <= allowed.get("endPort", allowed["port"])
            for allowed in rule["ports"]
        )
    ]


def test_prometheus_finds_the_ports_of_metrics_by_their_names() -> None:
    settings = yaml.safe_load((ROOT / "deploy/prometheus/kubernetes.yml").read_text())
    (job,) = settings["scrape_configs"]
    (discovery,) = job["kubernetes_sd_configs"]
    (keep,) = (r for r in job["relabel_configs"] if r.get("action") == "keep")
    assert keep["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    label, _, value = discovery["selectors"][0]["label"].partition("=")
    for name in OVERLAYS:
        for template in filter(None, map(pod_template, overlay(name))):
            assert template["metadata"]["labels"][label] == value
        for container in containers(overlay(name)):
            found = {port for port in container.ports if re.fullmatch(keep["regex"], port)}
            assert found == set(metrics_ports(container))
