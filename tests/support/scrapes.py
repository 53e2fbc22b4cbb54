"""What Prometheus would read from a service."""

import re
import urllib.request
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tools.launch import Service

TOLD = re.compile(r"listening for prometheus address=(\S+)")
OF_PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus 2 says it accepts."""
CLIENT_LIBRARYS = ("process_", "python_")
"""Of the process, not of ours."""


class Scrape:
    """The samples of one answer to `GET /metrics`."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        """By family; a counter's family has its name without `_total`."""
        self._samples = [sample for family in families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Of the series, as they are queried."""
        return {sample.name for sample in self._samples}

    @property
    def own_families(self) -> set[str]:
        """Families that the service has made."""
        return {name for name in self.kinds if not name.startswith(CLIENT_LIBRARYS)}

    def series(self, name: str) -> list[Mapping[str, str]]:
        """The labels of each series of a name."""
        return [sample.labels for sample in self._samples if sample.name == name]

    def sum(self, name: str, **labels: Any) -> float:
        """The sum of a name's series that have these labels; there must be one."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name
            and all(sample.labels.get(key) == str(value) for key, value in labels.items())
        ]
        assert found, f"no {name} with {labels} in {sorted(self.names)}"
        return sum(found)


def scrape(service: Service) -> Scrape:
    """The current metrics of a process with `--metrics-port`."""
    told = TOLD.search(service.log)
    assert told is not None, service.log
    return scrape_at(told[1])


def scrape_at(address: str) -> Scrape:
    """The metrics at HOST:PORT."""
    asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": OF_PROMETHEUS_2})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return Scrape(response.read().decode())
