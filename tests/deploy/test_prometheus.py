"""A real Prometheus reads our configuration, and no panel of the dashboard is empty under load.

Where there is no `prometheus` and `promtool` (Debian's package `prometheus` has both) this is not
run; what `test_monitoring.py` holds without them is less.
"""

import json
import math
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire_client import Client, SamplingParams
from pagewire_client.errors import PagewireError
from tests.support import dashboard
from tests.support.cluster import Cluster
from tests.support.manifests import containers, overlay
from tests.support.scrapes import TOLD
from tests.support.waiting import wait_until
from tools.launch import ROOT, Service, free_port

FOLDER = ROOT / "deploy/prometheus"
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs the programs prometheus and promtool",
)

INTERVAL = "1s"
RATE_INTERVAL = "15s"
METRICS = ("--metrics-port", "0")
MEMORY = ("--block-size", "16", "--simulate-gpu-blocks", "24", "--simulate-cpu-blocks", "64")
PROMPT = list(range(3, 67))


def promtool(*arguments: str) -> str:
    run = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_promtool_finds_nothing_wrong() -> None:
    for what, file in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        assert "SUCCESS" in promtool("check", what, "--lint-fatal", str(FOLDER / file))


def test_pods_are_scraped_at_each_port_of_metrics_as_the_service_they_are(tmp_path: Path) -> None:
    """Lists pods as Kubernetes would, because Debian's Prometheus lacks that discovery."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "kubernetes.yml").read_text())
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    [job] = config["scrape_configs"]
    del job["kubernetes_sd_configs"]
    job["static_configs"] = list(listed_pods())
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    assert "SUCCESS" in promtool("check", "config", "--lint-fatal", str(file))
    found = promtool("check", "service-discovery", "--timeout=1s", str(file), job["job_name"])
    kept = [target["labels"] for target in json.loads(found) if target["labels"]]
    assert sorted((labels["job"], labels["instance"]) for labels in kept) == sorted(
        [("pagewire-scheduler", "core:7611"), ("pagewire-frontend", "frontend:7601")]
        + [("pagewire-worker", f"worker:{port}") for port in range(7640, 7648)]
    )
    assert {(labels["namespace"], labels["pod"]) for labels in kept} == {
        ("here", name) for name in ("core", "frontend", "worker")
    }


def listed_pods() -> Iterator[dict[str, Any]]:
    """The targets of the group overlay, one for each port."""
    meta = "__meta_kubernetes_"
    for container in containers(overlay("group")):
        for name, port in container.ports.items():
            labels = {
                f"{meta}namespace": "here",
                f"{meta}pod_name": container.name,
                f"{meta}pod_phase": "Running",
                f"{meta}pod_container_port_name": name,
                f"{meta}pod_label_app_kubernetes_io_component": container.name,
            }
            yield {"targets": [f"{container.name}:{port}"], "labels": labels}


def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", str(Path(__file__).parent / "alerts_test.yml"))


class Prometheus:
    """A server with our own configuration, but for the addresses of the services."""

    def __init__(self, folder: Path, services: dict[str, list[Service]]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._targets = folder / "targets"
        self._targets.mkdir()
        self.set_targets(services)
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config()))
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
        config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
        for job in config["scrape_configs"]:
            del job["dns_sd_configs"]
            files = [str(self._targets / f"{job['job_name']}.json")]
            job["file_sd_configs"] = [{"files": files, "refresh_interval": INTERVAL}]
        return config

    def set_targets(self, services: dict[str, list[Service]]) -> None:
        """Set the addresses of each job's services."""
        for job, those in services.items():
            targets = [found[1] for process in those if (found := TOLD.search(process.log))]
            file = self._targets / f"{job}.json"
            file.with_suffix(".new").write_text(json.dumps([{"targets": targets}]))
            file.with_suffix(".new").rename(file)

    def get(self, path: str, **parameters: str) -> Any:
        """The answer of its HTTP API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=60) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an instant query, without NaN."""
        found = [
            float(sample["value"][1]) for sample in self.get("query", query=expression)["result"]
        ]
        return [value for value in found if not math.isnan(value)]

    def is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        with suppress(OSError):
            self.get("status/buildinfo")
            return True
        return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def load(address: str) -> Iterator[None]:
    """Requests that swap, share prefixes, fork, search and are cancelled, without end."""
    ended = threading.Event()

    def run(index: int) -> None:
        params = [
            SamplingParams(max_tokens=80, ignore_eos=True),
            SamplingParams(n=2, max_tokens=40, ignore_eos=True),
            SamplingParams(beam_width=2, max_tokens=20, ignore_eos=True),
            SamplingParams(max_tokens=60, ignore_eos=True),
        ][index % 4]
        with Client(address) as client:
            while not ended.is_set():
                with suppress(PagewireError):
                    client.generate([index + 70, *PROMPT], params, timeout=30)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.timeout(300)
def test_no_panel_is_empty_while_there_is_load(tmp_path: Path) -> None:
    flags = ["--simulate", "--simulate-step-us", "3000", *MEMORY, *METRICS]
    core_flags = (*METRICS, "--preemption-mode", "swap")
    with Cluster(tmp_path, worker_flags=flags, core_flags=core_flags, frontend_flags=METRICS) as c:
        c.start(num_workers=2, num_frontends=2)

        def services() -> dict[str, list[Service]]:
            assert c.core is not None
            return {
                "pagewire-scheduler": [c.core],
                "pagewire-frontend": c.frontends,
                "pagewire-worker": c.workers,
            }

        prometheus = Prometheus(tmp_path, services())
        try:
            wait_until(prometheus.is_ready, "Prometheus answers")
            with load(c.frontend_address(0)), load(c.frontend_address(1)):
                # On a busy machine a scrape may take longer than its second.
                seen = "max_over_time(up[1m])"
                wait_until(lambda: sum(prometheus.values(seen)) == 5, "all are scraped", 90)
                c.workers[0].kill()
                c.start_worker()
                c.wait_num_ready(2)
                prometheus.set_targets(services())
                check_panels(prometheus)
            check_rules(prometheus)
        finally:
            prometheus.stop()


def check_panels(prometheus: Prometheus) -> None:
    """Every query returns data, and those for events that occurred count them."""
    waiting = {
        expression: expression.replace("$__rate_interval", RATE_INTERVAL).replace("$model", ".*")
        for expression in dashboard.expressions()
    }
    deadline = time.monotonic() + 90
    while waiting:
        for expression, query in list(waiting.items()):
            if prometheus.values(query):
                del waiting[expression]
        assert time.monotonic() < deadline, f"nothing to show: {list(waiting)}"
    for happened in (
        "vllm:num_preemptions_total",
        "pagewire_swapped_out_blocks_total",
        "pagewire_copied_blocks_total",
        "vllm:prefix_cache_hits_total",
        "pagewire_worker_losses_total",
        "pagewire_requests_recovered_total",
    ):
        assert sum(prometheus.values(happened)) > 0, happened


def check_rules(prometheus: Prometheus) -> None:
    """Every alert is evaluated without an error."""
    [group] = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
