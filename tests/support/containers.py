"""Containers made of the kernel's namespaces alone, where there is no container engine.

Each has its own network (on a bridge they share), mounts, host name and process ids, and what the
compose file says of user, capabilities, root file system, tmpfs and volumes. Its root holds this
machine's /usr and Python, and the checkout's sources; what an image would add is not there.
"""

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.compose import ComposedService
from tools.launch import ROOT

UNSHARE = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
PYTHON = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
FROM_HOST = ["/usr", "/etc", "/dev"]
SOURCES = ("", "kernels", "client", "protos")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    # Its own library where it is built with one, not the one of this machine's other Python.
    "LD_LIBRARY_PATH": "/opt/python/lib",
    "PYTHONPATH": ":".join(
        [*(f"/opt/pagewire/{source}" for source in SOURCES), "/opt/site-packages"]
    ),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def can_contain() -> bool:
    """Whether this process may make namespaces and network interfaces."""
    probe = "ip link add name probe type bridge && mount -t tmpfs probe /mnt"
    try:
        return subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Container:
    """One replica of a service."""

    def __init__(self, name: str, address: str, service: ComposedService, folder: Path) -> None:
        self.name = name
        self.address = address
        self.service = service
        self._folder = folder
        self._environment = ENVIRONMENT | service.environment
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of its first process, seen from outside."""
        assert self._launcher is not None
        launcher = self._launcher.pid
        return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])

    @contextmanager
    def created(self) -> Iterator[None]:
        """Its namespaces are there, for the network to be connected; afterwards it starts."""
        script = "\n".join(["echo created", "read -r _", *self._setup(), f"exec {self._program()}"])
        with (self._folder / f"{self.name}.log").open("wb") as log:
            self._launcher = subprocess.Popen(
                [*UNSHARE, "sh", "-ec", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment | {"PATH": os.environ["PATH"]},
            )
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        assert self._launcher.stdout.readline() == b"created\n"
        yield
        self._launcher.stdin.write(b"go\n")
        self._launcher.stdin.close()

    def execute(self, *words: str) -> "CompletedProcess[str]":
        """Run `pagewire …` in the container, as its health check does."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--uts", "--pid"]
        command = [*enter, "--root", "--wd", *self._restrictions(), *_pagewire(words)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=self._environment
        )

    def is_healthy(self) -> bool:
        return self.execute(*self.service.health_command).returncode == 0

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """The exit code of its first process; raises subprocess.TimeoutExpired."""
        assert self._launcher is not None
        return self._launcher.wait(timeout=timeout_s)

    def has_ended(self) -> bool:
        return self._launcher is None or self._launcher.poll() is not None

    def remove(self) -> None:
        """End it with all that runs in it."""
        if self._launcher is not None:
            if not self.has_ended():
                # The first process: the kernel ends all others with it.
                self.signal(signal.SIGKILL)
            self._launcher.wait()
            for pipe in (self._launcher.stdin, self._launcher.stdout):
                assert pipe is not None
                pipe.close()

    def _setup(self) -> Iterator[str]:
        """Commands that make its root at /mnt, and leave it as the service wants it."""
        spec = self.service.spec
        yield "exec >&2"
        yield "mount --make-rprivate /"
        yield "mount -t tmpfs -o mode=755 root /mnt"
        for link in ("bin", "lib", "lib64", "sbin"):
            yield f"cp --no-dereference /{link} /mnt/"
        for path in FROM_HOST:
            yield _bind(path, path)
        yield _bind(sys.base_prefix, "/opt/python")
        yield _bind(sysconfig.get_path("purelib"), "/opt/site-packages")
        yield _bind(str(ROOT), "/opt/pagewire")
        for file in ("hosts", "resolv.conf"):
            yield _bind(str(self._folder / file), f"/etc/{file}")
        yield "mkdir /mnt/proc && mount -t proc proc /mnt/proc"
        for volume in spec.get("volumes", []):
            yield from self._mount_volume(volume)
        for tmpfs in spec["tmpfs"]:
            path, _, options = tmpfs.partition(":")
            yield f"mkdir -p /mnt{path} && mount -t tmpfs -o {options} tmpfs /mnt{path}"
        yield f"hostname {self.name}"
        if spec["read_only"]:
            yield "mount -o remount,ro /mnt"

    def _mount_volume(self, volume: str) -> Iterator[str]:
        source, target, *mode = volume.split(":")
        on_host = self._folder / "volumes" / source.strip("./")
        on_host.mkdir(parents=True, exist_ok=True)
        user, group = map(int, self.service.spec["user"].split(":"))
        os.chown(on_host, user, group)
        yield _bind(str(on_host), target)
        if "ro" in mode:
            yield f"mount -o remount,bind,ro /mnt{target}"

    def _program(self) -> str:
        words = ["chroot", "/mnt", *self._restrictions(), *_pagewire(self.service.command)]
        return shlex.join(words)

    def _restrictions(self) -> list[str]:
        """What starts a program with the service's user and rights."""
        spec = self.service.spec
        assert spec["cap_drop"] == ["ALL"]
        assert spec["security_opt"] == ["no-new-privileges:true"]
        user, group = spec["user"].split(":")
        words = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        return [*words, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def _bind(source: str, target: str) -> str:
    """A mount of this machine's file or folder in the container's root."""
    source, target = shlex.quote(source), shlex.quote(f"/mnt{target}")
    make = f"if [ -d {source} ]; then mkdir -p {target}; else [ -e {target} ] || touch {target}; fi"
    return f"{make}; mount --rbind {source} {target}"


def _pagewire(words: Sequence[str]) -> list[str]:
    """The images' entry point."""
    return [PYTHON, "-m", "pagewire_cli", *words]


class Engine:
    """Starts and ends the containers of one project, on one network."""

    def __init__(self, folder: Path) -> None:
        self.containers: list[Container] = []
        self._folder = folder
        self._host = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo created; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self._host.stdout is not None
        self._host.stdout.readline()
        self._on_host("ip", "link", "set", "lo", "up")
        self._on_host("ip", "link", "add", "bridge0", "type", "bridge")
        self._on_host("ip", "addr", "add", "10.77.0.1/24", "dev", "bridge0")
        self._on_host("ip", "link", "set", "bridge0", "up")

    def up(self, replicas: Sequence[tuple[ComposedService, int]]) -> None:
        """Start the given number of containers of each service, in this order."""
        names = [
            (f"{service.name}-{index}", service)
            for service, count in replicas
            for index in range(1, count + 1)
        ]
        for number, (name, service) in enumerate(names, start=2):
            self.containers.append(Container(name, f"10.77.0.{number}", service, self._folder))
        hosts = [f"{c.address} {c.service.name} {c.name}\n" for c in self.containers]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        (self._folder / "resolv.conf").touch()  # no server to ask: this machine's is out of reach
        for container in self.containers:
            with container.created():
                self._connect(container)

    def of(self, service: str) -> list[Container]:
        """All containers of a service."""
        return [container for container in self.containers if container.service.name == service]

    def run(self, *words: str) -> "CompletedProcess[str]":
        """Run `pagewire …` on the host's side of the network."""
        return self._on_host(sys.executable, "-m", "pagewire_cli", *words)

    def down(self) -> None:
        """End everything."""
        for container in self.containers:
            container.remove()
        self._host.kill()
        self._host.wait()
        assert self._host.stdout is not None
        self._host.stdout.close()

    def _connect(self, container: Container) -> None:
        pid, link = container.pid, f"veth{container.address.rpartition('.')[2]}"
        veth = ["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0"]
        self._on_host(*veth, "netns", str(pid))
        self._on_host("ip", "link", "set", link, "master", "bridge0", "up")
        inside = ["nsenter", "--target", str(pid), "--net", "ip"]
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{container.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "via", "10.77.0.1"],
        ):
            subprocess.run([*inside, *words], check=True)

    def _on_host(self, *command: str) -> "CompletedProcess[str]":
        roots = os.pathsep.join(str(ROOT / root) for root in SOURCES)
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self._host.pid}/ns/net", *command],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": roots},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done
