"""Starts a deployment on this machine, waits until it serves, and stops it in order."""

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, Self

from pagewire_cli.local import engine_args, service_commands
from pagewire_cli.local.health import is_taken, serving_checks
from pagewire_cli.local.runtime_directory import CORE, RuntimeDirectory
from pagewire_cli.local.service_process import OnLine, ServiceProcess
from pagewire_client.errors import LocalServiceError

DEFAULT_GRACE_PERIOD_S = 30.0
"""The services' own default of `--grace-period`."""

LOOPBACK = "127.0.0.1"
_PUBLIC_SETTINGS = ("PAGEWIRE_API_KEY", "PAGEWIRE_TLS_", "VLLM_API_KEY")
"""Prefixes of the environment variables that configure a frontend's authentication."""

_PURPOSES = {"listen": "", "http": " for HTTP", "metrics-port": " for metrics"}

_MARGIN_S = 10.0
"""Time that a service may need to stop in addition to its grace period."""
_POLL_S = 0.05


MAX_SERVICES = 1024
"""Most frontends and most workers: more than a machine runs."""


class LocalServices:
    """One core, frontends and workers as children of this process.

    They stop at `stop`, or when this process ends, even if it is killed.
    """

    def __init__(
        self,
        model: str,
        *,
        engine_flags: Mapping[str, Any] | None = None,
        num_frontends: int = 1,
        num_workers: int = 1,
        listen: str | None = None,
        http: str | None = None,
        metrics_port: str | None = None,
        api_keys: Sequence[str] = (),
        on_line: OnLine | None = None,
    ) -> None:
        """Starts nothing yet.

        `listen`: where the first frontend listens; further ones use the following ports. None:
        unix sockets that only this user can reach. `http`: HOST:PORT for HTTP, shared by all
        frontends; None: no HTTP. `metrics_port`: PORT or HOST:PORT of the core's metrics; the
        frontends and then the workers use the following ports. None: no metrics. `api_keys`: of
        which clients must send one; none: what the environment says. Raises ValueError that names
        a wrong argument.
        """
        if not model:
            raise ValueError("model: expected a directory, file, hub id or embedded, got no text")
        for name, number in (("num_frontends", num_frontends), ("num_workers", num_workers)):
            if not 1 <= number <= MAX_SERVICES:
                raise ValueError(f"{name}: expected 1 to {MAX_SERVICES}, got {number}")
        self._flags = engine_args.check_names(engine_flags or {})
        worker = service_commands.kind_of_worker(simulate=bool(self._flags.get("simulate")))
        service_commands.require(worker, "scheduler", "frontend")
        _check_metrics_port(metrics_port)
        indexes = range(num_frontends)
        public = [] if listen is None else [_following(listen, index) for index in indexes]
        self._output = _WithheldOutput(on_line)
        self._on_line = None if on_line is None else self._output.show
        self._stop_lock = threading.Lock()
        self._failed = threading.Event()
        self._folder = RuntimeDirectory()
        self._env = _environment(api_keys, is_private=listen is None)
        self.core_address = self._socket(CORE)
        self.http_address = http
        """Address at which the frontends listen for HTTP."""
        self.addresses = public or [self._socket(f"frontend-{index}") for index in indexes]
        """Addresses of the frontends."""
        self.metrics_addresses: list[str] = []
        """Addresses of the metrics, in the order of the services."""
        self._metrics_port = metrics_port
        self._core = self._make(
            "scheduler", "core", "--listen", self.core_address, *self._metrics_flags()
        )
        self._frontends = [self._make_frontend(index) for index in indexes]
        self._workers = [self._make_worker(model, i, num_workers) for i in range(num_workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def processes(self) -> list[ServiceProcess]:
        """All services, in the order in which they are stopped."""
        return [*self._frontends, *self._workers, self._core]

    @property
    def failure(self) -> LocalServiceError | None:
        """Why the deployment has failed; None while it runs."""
        return next((process.failure for process in self.processes if process.failure), None)

    def start(self, timeout_s: float | None = None) -> None:
        """Start all, and wait until every frontend serves.

        Their output is shown once all of them listen, which each does when it has checked its flags
        and the model's files: nothing else is printed above an error in those. It is also shown if
        one ends without a reason. Raises
        LocalServiceError with a service's last output if one fails, or after the timeout; nothing
        is left running then.
        """
        try:
            self._require_free()
            for process in (self._core, *self._workers, *self._frontends):
                process.start()
            self._wait_serving(timeout_s)
        except BaseException:
            self.kill()
            if not all(process.gave_reason for process in self.processes):
                self._output.release()
            raise
        for process in self.processes:
            process.restartable = True

    def stop(self) -> None:
        """Stop all gracefully: the frontends first, the core last."""
        grace = self._flags.get("grace_period")
        timeout_s = (DEFAULT_GRACE_PERIOD_S if grace is None else float(grace)) + _MARGIN_S
        with self._stop_lock:
            for stage in (self._frontends, self._workers, [self._core]):
                for process in stage:
                    process.terminate()
                for process in stage:
                    process.join(timeout_s)
            self._folder.remove()

    def kill(self) -> None:
        """Kill all services."""
        self._signal_kill()
        self.stop()

    def wait_failed(self) -> None:
        """Wait until a service was given up, or all were killed."""
        self._failed.wait()

    def _signal_kill(self) -> None:
        """Stop everything: without one of its services the deployment is useless."""
        self._failed.set()
        for process in self.processes:
            process.kill()

    def _require_free(self) -> None:
        """Raise if an address is taken: health checks would reach another deployment instead."""
        http = [] if self.http_address is None else [self.http_address]
        by_flag = {"listen": self.addresses, "http": http, "metrics-port": self.metrics_addresses}
        users = [(flag, address) for flag, named in by_flag.items() for address in named]
        for (flag, one), (other, address) in combinations(users, 2):
            if _overlap(one, address):
                raise LocalServiceError(
                    f"--{flag} and --{other} both use {address}: a service's address is that many"
                    " ports after the first one's; choose numbers further apart"
                )
        for flag, address in users:
            if is_taken(address):
                off = "" if flag == "listen" else f", --{flag} off needs none"
                raise LocalServiceError(
                    f"cannot listen on {address}{_PURPOSES[flag]}: address already in use; --{flag}"
                    f" chooses another address{off}"
                )

    def _wait_serving(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        own = [self._health(index) for index in range(len(self._frontends))]
        own += [self.core_address, *(self._worker(index) for index in range(len(self._workers)))]
        sockets = [Path(address.removeprefix("unix:")) for address in own]
        for index in range(len(self.addresses)):
            with serving_checks(self._health(index), _POLL_S) as is_serving:
                while not is_serving():
                    if self.failure:
                        raise self.failure
                    if all(socket.exists() for socket in sockets):
                        self._output.release()
                    if deadline is not None and time.monotonic() > deadline:
                        message = f"the services are not serving after {timeout_s:g} s"
                        raise LocalServiceError(message)
                    time.sleep(_POLL_S)
        self._output.release()

    def _make_frontend(self, index: int) -> ServiceProcess:
        shares_port = self.http_address is not None and len(self.addresses) > 1
        return self._make(
            "frontend",
            f"frontend-{index}",
            *("--core", self.core_address),
            *("--listen", self.addresses[index]),
            *("--health-listen", self._health(index)),
            *("--http", self.http_address or "off"),
            *(("--http-share-port",) if shares_port else ()),
            *self._metrics_flags(),
        )

    def _make_worker(self, model: str, index: int, num_workers: int) -> ServiceProcess:
        address = self._worker(index)
        return self._make(
            "worker",
            f"worker-{index}",
            *("--model", model),
            *("--core", self.core_address),
            *("--listen", address),
            *("--advertise", address),
            *("--group-id", f"worker-{index}"),
            *self._gpus_of(index),
            *(("--cpu-share", f"{index}/{num_workers}") if num_workers > 1 else ()),
            *self._metrics_flags(self._num_ranks),
        )

    def _gpus_of(self, index: int) -> tuple[str, ...]:
        """The flag for the GPUs that a worker uses: those after the ones of the workers before it.
        The environment may choose those of the first worker."""
        return ("--local-rank", str(index * self._num_ranks)) if index else ()

    def _metrics_flags(self, count: int = 1) -> tuple[str, str]:
        """The flag for a service of `count` processes. It is passed even without metrics, because
        the environment may contain one port for all services."""
        if self._metrics_port is None:
            return ("--metrics-port", "off")
        first = (
            self._metrics_port if ":" in self._metrics_port else f"{LOOPBACK}:{self._metrics_port}"
        )
        taken = len(self.metrics_addresses)
        mine = [_following(first, taken + index) for index in range(count)]
        self.metrics_addresses += mine
        return ("--metrics-port", mine[0])

    @property
    def _num_ranks(self) -> int:
        """Number of processes of one worker."""
        sizes = (self._flags.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline"))
        return prod(int(size or 1) for size in sizes)

    def _make(self, service: str, name: str, *arguments: str) -> ServiceProcess:
        command = [
            *service_commands.COMMANDS[service],
            *arguments,
            *engine_args.arguments(service, self._flags),
        ]
        return ServiceProcess(name, command, self._on_line, self._signal_kill, self._env)

    def _health(self, index: int) -> str:
        """Address of a frontend's health checks, which need neither TLS nor an API key."""
        return self._socket(f"frontend-{index}-health")

    def _worker(self, index: int) -> str:
        return self._socket(f"worker-{index}")

    def _socket(self, name: str) -> str:
        return f"unix:{self._folder.path / name}.sock"


class _WithheldOutput:
    """Output of services, which is shown once all of them listen."""

    def __init__(self, on_line: OnLine | None) -> None:
        self._on_line = on_line
        self._withheld: list[tuple[str, str]] | None = []
        self._lock = threading.Lock()

    def show(self, name: str, line: str) -> None:
        """Show a line of a service's output, or withhold it; runs on a thread of the service."""
        assert self._on_line is not None
        with self._lock:
            if self._withheld is None:
                self._on_line(name, line)
            else:
                self._withheld.append((name, line))

    def release(self) -> None:
        """Show what was withheld, and withhold nothing from now on."""
        with self._lock:
            withheld, self._withheld = self._withheld or (), None
            for name, line in withheld:
                assert self._on_line is not None
                self._on_line(name, line)


def _environment(api_keys: Sequence[str], *, is_private: bool) -> dict[str, str]:
    """The services' environment. Authentication for other deployments would refuse this process,
    so that private services have none of it."""
    environment = service_commands.environment()
    if is_private:
        for name in [name for name in environment if name.startswith(_PUBLIC_SETTINGS)]:
            del environment[name]
    if api_keys:
        environment["PAGEWIRE_API_KEY"] = " ".join(api_keys)
    return environment


def _check_metrics_port(text: str | None) -> None:
    port = "1" if text is None else text.rpartition(":")[2]
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= 65535):
        raise ValueError(
            f"metrics_port: expected PORT or HOST:PORT from 1 to 65535, or off, got {text!r}"
        )


def _overlap(one: str, other: str) -> bool:
    """Whether two services cannot both listen: the same address, or one has the port on all."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    on_all = {host, other_host} & {"0.0.0.0", "[::]", "::"}
    is_chosen = port.isdecimal() and int(port) == 0
    return not is_chosen and port == other_port and (host == other_host or bool(on_all))


def _following(listen: str, index: int) -> str:
    """The address `index` places after `listen`: the next ports, or numbered paths."""
    if index == 0:
        return listen
    if listen.startswith("unix:"):
        return f"{listen}.{index}"
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= 65535 - index:
        raise ValueError(f"listen: expected HOST:PORT with room for more ports, got {listen!r}")
    return f"{host}:{int(port) + index}"
