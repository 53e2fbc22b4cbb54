"""Frontends that share an HTTP port, one of which is stopped."""

import json
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.simulated_services import free_port

NUM_AFTER = 200
"""Requests that are still made when the frontend has ended."""


def test_no_request_on_a_new_connection_is_lost_when_a_frontend_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    flags = ["--http", f"127.0.0.1:{port}", "--http-share-port"]
    worker = ["--simulate", "--simulate-step-us", "2000"]
    statuses: Counter[str] = Counter()
    with Cluster(tmp_path, worker_flags=worker, frontend_flags=flags) as cluster:
        cluster.start(num_frontends=2)
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4})
        ended = threading.Event()

        def call(_: int) -> None:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request(
                    "POST", "/v1/completions", body, {"Content-Type": "application/json"}
                )
                statuses[str(connection.getresponse().status)] += 1
            except OSError as error:
                statuses[repr(error)] += 1
            finally:
                connection.close()

        def stop() -> None:
            cluster.frontends[0].kill(signal.SIGTERM)
            ended.set()

        with ThreadPoolExecutor(4) as callers:
            list(callers.map(call, range(100)))
            stopping = threading.Thread(target=stop)
            stopping.start()
            while not ended.is_set():
                list(callers.map(call, range(20)))
            list(callers.map(call, range(NUM_AFTER)))
            stopping.join()
        assert cluster.frontends[0].process.returncode == 0
    assert statuses.keys() == {"200"}
