"""The services of docker-compose.yml, with its commands, environment, users, rights and mounts."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compose import services
from tests.support.containers import Container, Engine, can_contain

pytestmark = [
    pytest.mark.skipif(
        not can_contain(), reason="needs root (and iproute2, util-linux) for its own namespaces"
    ),
    pytest.mark.timeout(600),
]

ON_CPU = {"PAGEWIRE_DEVICE": "cpu", "PAGEWIRE_KV_CACHE_MEMORY": "64MiB"}
"""There is no GPU where this runs, and memory takes time to fill: all in which the GPU's service is
changed."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    try:
        yield engine
    finally:
        engine.down()


def start(engine: Engine, worker: str, num_workers: int) -> None:
    """`docker compose up --scale WORKER=NUM`, until every health check is content."""
    composed = services()
    composed[worker].spec["environment"].update(ON_CPU)
    replicas = {"scheduler": 1, "frontend": 1, worker: num_workers}
    engine.up([(composed[name], count) for name, count in replicas.items()])
    for container in engine.containers:
        wait_healthy(container)


def wait_healthy(container: Container) -> None:
    deadline = time.monotonic() + 400
    while not container.is_healthy():
        assert not container.has_ended(), container.log
        assert time.monotonic() < deadline, container.log
        time.sleep(0.1)


def wait_groups(engine: Engine, num_groups: int) -> None:
    """Every replica has found the core by its name, and been found by its address."""
    (core,) = engine.of("scheduler")
    deadline = time.monotonic() + 60
    while core.log.count("group ready") < num_groups:
        assert time.monotonic() < deadline, core.log
        time.sleep(0.05)


def answer(engine: Engine) -> str:
    (frontend,) = engine.of("frontend")
    address = f"{frontend.address}:7600"
    return engine.run("generate", "--address", address, "--temperature", "0", "27 + 45 =").stdout


@pytest.mark.parametrize(("worker", "num_workers"), [("worker", 2), ("worker-cpu", 1)])
def test_it_answers_and_every_service_ends_in_time(
    engine: Engine, worker: str, num_workers: int
) -> None:
    start(engine, worker, num_workers)
    assert "72" in answer(engine)
    wait_groups(engine, num_workers)

    leaving, *staying = engine.of(worker)
    if staying:
        leaving.signal(signal.SIGTERM)
        assert leaving.wait(leaving.service.stop_grace_s) == 0, leaving.log
        assert "72" in answer(engine)

    remaining = [running for running in engine.containers if not running.has_ended()]
    for container in remaining:
        container.signal(signal.SIGTERM)
    for container in remaining:
        assert container.wait(container.service.stop_grace_s) == 0, container.log


def test_a_service_can_write_nowhere_but_where_the_file_says(engine: Engine) -> None:
    composed = services()
    engine.up([(composed["scheduler"], 1)])
    (scheduler,) = engine.containers
    wait_healthy(scheduler)
    status = Path(f"/proc/{scheduler.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    mounts = Path(f"/proc/{scheduler.pid}/mounts").read_text().splitlines()
    options = {line.split()[1]: line.split()[3].split(",") for line in mounts}
    assert "ro" in options["/"]
    assert "rw" in options["/tmp"]
    assert "noexec" not in options["/tmp"], "kernels are compiled there, and loaded"
