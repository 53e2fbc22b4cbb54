"""Makes the dashboard's pictures in docs/images: a deployment under load, seen three ways.

python -m tests.browser.screenshots
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser

from pagewire_client import SamplingParams
from tests.browser import chromium
from tests.browser.deployment import Deployment, Job

FOLDER = Path(__file__).parents[2] / "docs/images"
LOAD_S = 95
"""How long the load runs before the pictures are taken, so that charts have something to show."""
SETTLE_MS = 2_500
FRESH = """async (group) => {
  const { choose, view } = await import("/dashboard/main.js");
  const left = (request) => request.max_tokens * request.num_sequences - request.num_output_tokens;
  const lasts = ([, request]) => request.group_id === group && left(request) > 150;
  const there = Object.entries(view.facts.requests).filter(lasts);
  choose(Number(there.sort((a, b) => b[1].events.length - a[1].events.length)[0][0]));
  document.querySelector(".group:last-child").scrollIntoView();
}"""
"""Chooses the request of a worker group to which most has happened and that goes on for a while."""

NUM_REQUESTS = 56
WORKER_FLAGS = (
    *("--simulate-step-us", "25000"),
    *("--simulate-sequence-us", "400"),
    *("--simulate-token-us", "60"),
    *("--simulate-gpu-blocks", "768"),
    *("--simulate-cpu-blocks", "192"),
)
OVERVIEWS = (
    ("dashboard-light.png", 1360, 1128, "light"),
    ("dashboard-dark.png", 1360, 1128, "dark"),
    ("dashboard-phone.png", 390, 1560, "dark"),
)
REQUESTS = (
    ("dashboard-request-light.png", 1360, 1010, "light"),
    ("dashboard-request-dark.png", 1360, 1010, "dark"),
)
"""Of the last worker group, and what is beneath it, with a request chosen."""


def jobs() -> Sequence[Job]:
    """Half of them share a prefix with others; some have several choices."""
    draw = random.Random(7)
    shared = [[draw.randrange(3, 30_000) for _ in range(n)] for n in (96, 160, 240, 320)]
    made = []
    for _ in range(NUM_REQUESTS):
        beginning = draw.choice(shared) if draw.random() < 0.5 else []
        own = [draw.randrange(3, 30_000) for _ in range(draw.randint(16, 400))]
        params = SamplingParams(
            max_tokens=draw.randint(40, 600),
            ignore_eos=True,
            n=draw.choice((1, 1, 1, 1, 3)),
            temperature=1.0,
        )
        made.append(([*beginning, *own], params))
    return made


def take(browser: Browser, url: str) -> None:
    """All views, one after the other: each page receives the minutes before."""
    for view in (*OVERVIEWS, *REQUESTS):
        name, width, height, scheme = view
        viewport = {"width": width, "height": height}
        page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url, timeout=120_000)
        page.locator("#requests tbody tr").first.wait_for(timeout=120_000)
        page.wait_for_timeout(SETTLE_MS)
        if view in REQUESTS:
            page.evaluate(FRESH, "worker-1")
            page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=FOLDER / name, timeout=120_000)
        print(name, (FOLDER / name).stat().st_size // 1024, "KB")
        page.close()


def main() -> None:
    """Start everything, wait, take the pictures."""
    program = chromium.find()
    assert program is not None, "no Chromium: `npm ci` in tests/browser installs one"
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder), jobs(), worker_flags=WORKER_FLAGS, pause_s=3.0) as deployment,
        chromium.running(program) as browser,
    ):
        deployment.start(2)
        with browser.new_page() as watching:  # the frontend keeps points while a page is open
            watching.goto(deployment.url)
            watching.wait_for_timeout(LOAD_S * 1_000)
        take(browser, deployment.url)


if __name__ == "__main__":
    main()
