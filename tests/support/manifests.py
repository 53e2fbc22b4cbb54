"""The Kubernetes manifests of `deploy/kubernetes`, as objects.

Our kustomizations only list resources, so that putting them together takes no kustomize.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.launch import ROOT

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())

LEADER_WORKER_SET = "LeaderWorkerSet"
INJECTED = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "pagewire-group-0.pagewire-group.default",
}
"""What the LeaderWorkerSet controller puts into its containers' environment, of the second pod."""

Manifest = dict[str, Any]


def overlay(name: str) -> list[Manifest]:
    """All objects of an overlay."""
    return list(_read(KUBERNETES / "overlays" / name))


def _read(path: Path) -> Iterator[Manifest]:
    if path.is_dir():
        kustomization = yaml.safe_load((path / "kustomization.yaml").read_text())
        assert set(kustomization) == {"apiVersion", "kind", "resources"}
        for resource in kustomization["resources"]:
            yield from _read((path / resource).resolve())
    else:
        yield from yaml.safe_load_all(path.read_text())


def pod_template(manifest: Manifest) -> Manifest | None:
    """The pods that an object makes, if it makes any."""
    if manifest["kind"] == "Deployment":
        return manifest["spec"]["template"]
    if manifest["kind"] == LEADER_WORKER_SET:
        return manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return None


@dataclass(frozen=True)
class Container:
    """A container of a service, with its arguments."""

    name: str
    spec: Manifest
    pod: Manifest
    arguments: list[str]
    """Of the image's entry point, `pagewire`."""

    variables: Mapping[str, str]

    @property
    def port(self) -> int:
        """Where it is called by gRPC."""
        return self.ports["grpc"]

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        return {port["name"]: int(port["containerPort"]) for port in self.spec["ports"]}

    def probes(self) -> Iterator[tuple[str, Manifest]]:
        """(its kind, the gRPC action) of each."""
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            yield kind, self.spec[kind]["grpc"]


def containers(manifests: list[Manifest]) -> list[Container]:
    """All containers of some objects."""
    settings = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    found = []
    for manifest in manifests:
        template = pod_template(manifest)
        for spec in [] if template is None else template["spec"]["containers"]:
            variables = {variable["name"]: _value(variable, settings) for variable in spec["env"]}
            if manifest["kind"] == LEADER_WORKER_SET:
                variables |= INJECTED
            arguments = [_expand(argument, variables) for argument in spec["args"]]
            found.append(Container(spec["name"], spec, template["spec"], arguments, variables))
    return found


def _value(variable: Manifest, settings: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    reference = variable["valueFrom"]["configMapKeyRef"]
    return settings[reference["name"]][reference["key"]]


def _expand(argument: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes does it."""
    for name, value in variables.items():
        argument = argument.replace(f"$({name})", value)
    return argument
