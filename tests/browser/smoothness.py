"""How smooth the dashboard is: what its page and its frontend do with a large, made-up deployment.

python -m tests.browser.smoothness --groups 4 --blocks 100000 --requests 256

Times are processor time, from Chromium's own trace, so that other load does not count. A page is
smooth while no task takes longer than 50 ms, and drawing a frame less than 16.
"""

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page

from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.frontend.http.dashboard.hub import Hub
from tests.browser import chromium
from tests.browser.made_up_status import MadeUpEngine
from tests.support.fake_core import FakeCore
from tests.support.http_frontends import http_frontend

INTERVAL_S = 1.0
WARM_UP_S = 4.0


class LargeCore(FakeCore):
    """Reports a made-up deployment once a second."""

    def __init__(self, engine: MadeUpEngine) -> None:
        super().__init__()
        self._engine = engine

    async def WatchStatus(self, request: Any, context: Any) -> None:
        while True:
            status = self._engine.next_status()
            await context.write(pb.SchedulerServiceWatchStatusResponse(status=status))
            await asyncio.sleep(INTERVAL_S)


class Stopwatch:
    """Processor time of each status at the frontend, on the loop that serves streams."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []
        publish = Hub._publish

        def timed(hub: Hub, status: Any) -> Any:
            before = time.thread_time()
            result = publish(hub, status)
            self.times_ms.append((time.thread_time() - before) * 1000)
            return result

        Hub._publish = timed  # type: ignore[method-assign, assignment]


@contextmanager
def deployment(engine: MadeUpEngine) -> Iterator[str]:
    """A frontend in a thread, and the address of its page."""
    loop = asyncio.new_event_loop()
    addresses: list[str] = []
    ready = threading.Event()
    end = asyncio.Event()

    async def serve() -> None:
        async with LargeCore(engine) as core, http_frontend(core.address) as frontend:
            assert frontend.http is not None
            addresses.append(f"http://{frontend.http.address}/")
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(60)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def trace(browser: Browser, page: Page, seconds: float) -> list[dict[str, Any]]:
    """The tasks of the page's main thread, with their durations in ms of processor time."""
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    page.wait_for_timeout(seconds * 1000)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    return [
        {"name": event["name"], "ms": event["tdur"] / 1000, "wall_ms": event["dur"] / 1000}
        for event in events
        if "tdur" in event and (event["pid"], event["tid"]) in mains
    ]


def summary(events: list[dict[str, Any]], seconds: float) -> str:
    """The figures for one way of looking at the page."""
    tasks = sorted(event["ms"] for event in events if event["name"].endswith("RunTask"))
    frames = sorted(event["ms"] for event in events if event["name"] == "FireAnimationFrame")
    share = sum(tasks) / 10 / seconds
    return (
        f"main thread {share:.1f} % of a core; tasks over 50 ms: {sum(t > 50 for t in tasks)}, "
        f"longest {tasks[-1]:.1f} ms; drawings: {len(frames)}, "
        f"median {statistics.median(frames or [0]):.1f} ms, longest {max(frames or [0]):.1f} ms"
    )


def measure(browser: Browser, url: str, seconds: float) -> None:
    """Use the page like a person, and print the cost."""
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    page.goto(url)
    page.locator("#requests tbody tr").first.wait_for(timeout=120_000)
    page.wait_for_timeout(WARM_UP_S * 1000)
    print("at rest:", summary(trace(browser, page, seconds), seconds))
    page.locator(".pick").nth(3).click()
    page.wait_for_timeout(WARM_UP_S * 1000)
    print("a request chosen:", summary(trace(browser, page, seconds), seconds))


def main() -> None:
    """Measure with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    engine = MadeUpEngine(
        num_groups=args.groups, num_blocks=args.blocks, num_requests=args.requests
    )
    stopwatch = Stopwatch()
    program = chromium.find()
    assert program is not None, "no Chromium: `npm ci` in tests/browser installs one"
    with deployment(engine) as url, chromium.running(program) as browser:
        measure(browser, url, args.seconds)
    later = stopwatch.times_ms[2:]
    print(
        f"frontend, for all browsers: {statistics.median(later):.1f} ms of its event loop per "
        f"look, longest {max(later):.1f}, the first {stopwatch.times_ms[0]:.1f}"
    )


if __name__ == "__main__":
    main()
