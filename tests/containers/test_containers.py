"""docker-compose.yml in a real engine: images, rights, clients, scaling, disturbances, monitoring.

`make test-containers` runs it. The tests share one deployment and are in the order in which it
lives.
"""

import json
import os
import shutil
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from pagewire_cli.app import app
from pagewire_client import Client, NotAuthorized, SamplingParams
from tests.containers.load import Load
from tests.support.docker import (
    DOCKERFILE,
    PROJECT,
    PROMETHEUS_DOCKERFILE,
    Compose,
    Docker,
    engine,
    exit_codes,
    make_base,
    run,
    torch_index,
    torch_requirement,
    why_not,
)
from tests.support.waiting import wait_until
from tools.launch import ROOT

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

OURS = ("scheduler", "frontend", "worker-cpu")
SERVICES = (*OURS, "prometheus")
MIB = 2**20
ABSENCE_S = 4.0
"""Longer than a lease."""


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    with engine(tmp_path_factory.mktemp("engine")) as docker:
        yield docker


@pytest.fixture(scope="module")
def base(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(docker, tmp_path_factory.mktemp("base"))


def build(docker: Docker, base: str, target: str, tag: str, context: Path = ROOT) -> None:
    with torch_index() as (torch, index):
        docker.build(
            tag,
            *("--target", target, "--file", str(context / DOCKERFILE.relative_to(ROOT))),
            *("--build-arg", f"BASE={base}"),
            *("--build-arg", f"TORCH={torch}", "--build-arg", f"TORCH_INDEX={index}"),
            str(context),
        )


IMAGES = {image: f"pagewire/{image}:0.1.0" for image in ("scheduler", "worker-cpu", "worker-cuda")}
"""By target, as the compose file names them."""


@pytest.fixture(scope="module")
def images(docker: Docker, base: str) -> dict[str, str]:
    for target, tag in IMAGES.items():
        build(docker, base, target, tag)
    folder = str(PROMETHEUS_DOCKERFILE.parent)
    flags = ["--file", str(PROMETHEUS_DOCKERFILE), "--build-arg", f"BASE={base}"]
    docker.build("prom/prometheus:v3.5.0", *flags, folder)
    return IMAGES


def free_pair() -> int:
    """The first of two free ports that follow each other."""
    for port in range(20_000, 30_000, 2):
        try:
            for used_port in (port, port + 1):
                socket.create_server(("127.0.0.1", used_port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no two free ports")


def ports() -> dict[str, str]:
    """Variables of the compose file: two free ports each for gRPC and HTTP."""
    grpc_port = free_pair()
    http_port = grpc_port + 2
    return {
        "PAGEWIRE_PORT": f"{grpc_port}-{grpc_port + 1}",
        "PAGEWIRE_HTTP_PORT": f"{http_port}-{http_port + 1}",
    }


@pytest.fixture(scope="module")
def compose(docker: Docker, images: dict[str, str]) -> Iterator[Compose]:
    compose = Compose(docker, ports())
    try:
        compose.up(SERVICES)
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "10")


def published(compose: Compose, port: int) -> list[str]:
    """Where the frontends' port is on this machine."""
    found = []
    for name in compose.containers("frontend"):
        ports = compose.docker.inspect(name)["NetworkSettings"]["Ports"]
        found += [f"{binding['HostIp']}:{binding['HostPort']}" for binding in ports[f"{port}/tcp"]]
    return found


def wait_healthy(compose: Compose) -> None:
    def are_healthy() -> bool:
        states = [
            compose.docker.inspect(name)["State"]
            for service in OURS
            for name in compose.containers(service)
        ]
        return all(state.get("Health", {}).get("Status") == "healthy" for state in states)

    wait_until(are_healthy, "every container is healthy", timeout_s=120)


# Images.


def size(docker: Docker, tag: str) -> float:
    return float(docker.inspect(tag)["Size"]) / MIB


def layer_size(docker: Docker, image: str, command: str) -> float:
    """Of the layer that a command with this text in it has made."""
    history = docker(
        "history", "--no-trunc", "--human=false", "--format", "{{json .}}", IMAGES[image]
    )
    layers = [json.loads(line) for line in history.splitlines()]
    [found] = [layer for layer in layers if command in layer["CreatedBy"]]
    return float(found["Size"]) / MIB


def test_images_are_small(docker: Docker, base: str, images: dict[str, str]) -> None:
    of_base = size(docker, base)
    over = {image: size(docker, tag) - of_base for image, tag in images.items()}
    torch = {
        image: layer_size(docker, image, 'pip install "${TORCH}"')
        for image in ("worker-cpu", "worker-cuda")
    }
    compiler = layer_size(docker, "worker-cuda", "--no-install-recommends gcc")
    packages = layer_size(docker, "worker-cuda", "/requirements/gpu.txt")
    attention = layer_size(docker, "worker-cuda", 'case "${ATTENTION}"')
    print(f"MiB over a base of {of_base:.0f}: {over}, of which torch {torch}")
    print(f"worker-cuda: {compiler=:.0f}, {packages=:.0f}, {attention=:.0f}")
    assert over["scheduler"] <= 250
    assert over["worker-cpu"] - torch["worker-cpu"] <= 320
    assert compiler <= 250
    assert attention <= 500
    assert over["worker-cuda"] - torch["worker-cuda"] - compiler - packages - attention <= 40


def test_a_change_to_the_code_rebuilds_the_last_layer_only(
    docker: Docker, base: str, images: dict[str, str], tmp_path: Path
) -> None:
    sources = f"git ls-files -z | tar --null --files-from=- --create | tar -x -C {tmp_path}"
    run("bash", "-c", sources, cwd=ROOT)
    for package in ("scheduler_service", "worker_service"):
        with (tmp_path / package / "errors.py").open("a") as file:
            file.write(f"# changed at {time.time()}\n")
    for target, tag in images.items():
        began = time.monotonic()
        build(docker, base, target, "pagewire-test/changed", tmp_path)
        print(f"{target} rebuilt in {time.monotonic() - began:.1f} s")
        former, changed = (
            docker.inspect(state)["RootFS"]["Layers"] for state in (tag, "pagewire-test/changed")
        )
        assert changed[:-1] == former[:-1]
        assert changed[-1] != former[-1]


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_a_container_that_starts_can_be_stopped(
    docker: Docker, images: dict[str, str], role: str, after_s: float
) -> None:
    tag = images["scheduler" if role == "scheduler" else "worker-cpu"]
    name = f"{PROJECT}-starting"
    docker("run", "--detach", "--network", "none", "--name", name, tag, role)
    try:
        time.sleep(after_s)
        docker("stop", "--time", "20", name)
        [code] = exit_codes(docker, [name]).values()
        assert code in (0, 143), f"{code}; 137 is SIGKILL after the whole time"
    finally:
        docker("rm", "--force", name)


# The image for GPUs, on a machine without one, and with the torch for CPUs: that for CUDA
# takes 4.6 GiB.

CONFINED = (
    *("--network", "none", "--read-only", "--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--env", "HOME=/tmp"),
)
"""The limits of the compose file."""


def test_the_gpu_image_ends_where_there_is_no_gpu(docker: Docker, images: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="device: expected cpu, because torch finds no GPU"):
        docker("run", "--rm", *CONFINED, images["worker-cuda"], timeout_s=60)


def test_the_gpu_image_has_what_the_first_start_on_a_gpu_needs(
    docker: Docker, images: dict[str, str]
) -> None:
    tag = images["worker-cuda"]
    script = (Path(__file__).parent / "inside_worker_cuda.py").read_text()
    inside = ["run", "--rm", "--interactive", *CONFINED, "--entrypoint", "python", tag, "-"]
    found = json.loads(docker(*inside, input=script).splitlines()[-1])
    assert found["kernel"] > 0
    assert found["launcher"] == ["launch", "load_binary"]
    assert found["torch of vLLM"] == [torch_requirement()]
    assert not found["has vLLM"]
    assert {"seqused_k", "block_table", "fa_version"} <= {*found["parameters"]}


def test_a_worker_of_the_gpu_image_computes_on_cpus_if_told_to(
    docker: Docker, images: dict[str, str]
) -> None:
    name = f"{PROJECT}-gpu-image"
    docker(
        *("run", "--detach", "--name", name, *CONFINED),
        *(images["worker-cuda"], "worker", "--device", "cpu"),
    )
    try:
        assert docker("exec", name, "id", "--user") == "10001"
        ready = "until pagewire health 127.0.0.1:7620; do sleep 0.1; done"
        docker("exec", name, "sh", "-c", ready, timeout_s=60)
        docker("exec", name, "pagewire", "conformance", "--only", "steps:", "127.0.0.1:7620")
    finally:
        docker("rm", "--force", name)


# The deployment.


def test_clients_reach_it_from_outside(compose: Compose) -> None:
    [grpc_address] = published(compose, 7600)
    [http_address] = published(compose, 8000)
    with Client(grpc_address) as client:
        answer = client.generate("What is 27 + 45?", SamplingParams(temperature=0, max_tokens=8))
        assert answer.finished
    talk = openai.OpenAI(base_url=f"http://{http_address}/v1", api_key="none").chat.completions
    message = {"role": "user", "content": "What is 27 + 45?"}
    said = talk.create(model="embedded", messages=[message], temperature=0)  # type: ignore[list-item]
    assert said.choices[0].message.content == "27 + 45 = 72."
    with urllib.request.urlopen(f"http://{http_address}/", timeout=10) as page:
        assert b"<title>Pagewire" in page.read()


def test_containers_have_no_rights_and_nothing_to_write_to(compose: Compose) -> None:
    for service in OURS:
        [name] = compose.containers(service)

        def inside(script: str, name: str = name) -> str:
            return compose.docker("exec", name, "sh", "-c", script)

        assert inside("id -u") == "10001"
        assert "CapEff:\t0000000000000000" in inside("cat /proc/1/status")
        assert "NoNewPrivs:\t1" in inside("cat /proc/1/status")
        assert inside("touch /tmp/here && rm /tmp/here && echo yes") == "yes"
        refused = "touch /home/pagewire/x /usr/x /etc/x 2>/dev/null || echo no"
        assert inside(refused) == "no"
        assert "Traceback" not in compose.docker("logs", name)


@pytest.fixture(scope="module")
def load(compose: Compose) -> Iterator[Load]:
    """On two frontends, one of which may be away."""
    compose.up(SERVICES, {"frontend": 2})
    load = Load(published(compose, 7600))
    load.start()
    yield load
    load.stop()


def test_workers_come_and_go_under_load(compose: Compose, load: Load) -> None:
    load.check()
    for num_workers in (4, 1, 2):
        compose.up(SERVICES, {"frontend": 2, "worker-cpu": num_workers})
        load.check()


def kill(compose: Compose, name: str) -> None:
    compose.docker("kill", name)
    time.sleep(ABSENCE_S)
    compose.docker("start", name)


def pause(compose: Compose, name: str) -> None:
    for tries_left in (2, 1, 0):  # the engine gives up on processes that never wait
        try:
            compose.docker("pause", name)
            break
        except AssertionError as error:
            if "unable to freeze" not in str(error) or not tries_left:
                raise
    time.sleep(ABSENCE_S)
    compose.docker("unpause", name)


def disconnect(compose: Compose, name: str) -> None:
    network, service = f"{PROJECT}_default", name.removeprefix(f"{PROJECT}-").rpartition("-")[0]
    compose.docker("network", "disconnect", network, name)
    time.sleep(ABSENCE_S)
    compose.docker("network", "connect", "--alias", service, network, name)


@pytest.mark.parametrize("service", OURS)
@pytest.mark.parametrize("disturb", [kill, pause, disconnect])
def test_no_stream_changes_when_a_container_is_disturbed(
    compose: Compose, load: Load, disturb: Callable[[Compose, str], None], service: str
) -> None:
    disturb(compose, compose.containers(service)[0])
    wait_healthy(compose)
    load.check()


def test_a_deployment_stops_in_time_and_goes_on(compose: Compose, load: Load) -> None:
    """Its clients wait, and continue when it is started again."""
    names = [name for service in OURS for name in compose.containers(service)]
    began = time.monotonic()
    compose("stop")
    print(f"stopped under load in {time.monotonic() - began:.1f} s")
    assert set(exit_codes(compose.docker, names).values()) == {0}
    compose("start", *SERVICES)
    wait_healthy(compose)
    load.check()


def test_keys_and_the_token_between_services_are_secrets(
    docker: Docker, images: dict[str, str], tmp_path: Path
) -> None:
    """As `deploy/compose/secure.yml` describes it, in a copy of the folder."""
    for file in ("docker-compose.yml", "deploy/compose/secure.yml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    clients, cluster = tmp_path / "secrets/clients", tmp_path / "secrets/cluster"

    def write_secret(file: Path, secret: str) -> None:
        """Owned by the containers' user, in the place of the previous file, if there is one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.touch(0o600)
        new.write_text(secret)
        for path in (new, file.parent):
            os.chown(path, 10001, 10001)
        new.replace(file)

    def new_key() -> str:
        made = CliRunner().invoke(app, ["key", "new", "--tenant", "production"])
        write_secret(clients / "keys.toml", made.stdout)
        return made.stderr.split()[-1]

    key = new_key()
    write_secret(cluster / "token", "0123456789abcdef" * 4)
    files = ("docker-compose.yml", "deploy/compose/secure.yml")
    project = f"{PROJECT}-secure"
    compose = Compose(docker, ports(), project=project, folder=tmp_path, files=files)
    try:
        compose.up(OURS)
        assert "can read a secret" not in compose("logs")
        [address] = published(compose, 7600)
        with Client(address) as client, pytest.raises(NotAuthorized):
            client.get_model()
        for _ in range(2):  # the second time with another key, in the place of the first
            with Client(address, api_key=key) as client:
                assert client.generate("27 + 45 =", SamplingParams(max_tokens=8)).finished
            revoked, key = key, new_key()
            with Client(address, api_key=revoked) as client, pytest.raises(NotAuthorized):
                client.get_model()
    finally:
        compose("down", "--volumes", "--timeout", "10")
