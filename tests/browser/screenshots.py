"""Makes the dashboard's pictures in docs/images: a deployment under load, seen three ways.

python -m tests.browser.screenshots
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, Page

from pagewire_client import SamplingParams
from tests.browser import chromium
from tests.browser.deployment import Deployment, Job

FOLDER = Path(__file__).parents[2] / "docs/images"
LOAD_S = 45
"""How long the load runs before the pictures are taken, so that charts have something to show."""

NUM_REQUESTS = 56
WORKER_FLAGS = (
    *("--simulate-step-us", "25000"),
    *("--simulate-sequence-us", "400"),
    *("--simulate-token-us", "60"),
    *("--simulate-gpu-blocks", "768"),
    *("--simulate-cpu-blocks", "192"),
)
VIEWS = (
    ("dashboard-light.png", 1360, 1760, "light"),
    ("dashboard-dark.png", 1360, 1760, "dark"),
    ("dashboard-phone.png", 390, 1560, "dark"),
)


def jobs() -> Sequence[Job]:
    """Half of them begin like others; some have several choices."""
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
    """All views, of one time."""
    pages: list[Page] = []
    for _, width, height, scheme in VIEWS:
        viewport = {"width": width, "height": height}
        page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        pages.append(page)
    pages[0].wait_for_timeout(LOAD_S * 1_000)
    for page, (name, *_) in zip(pages, VIEWS, strict=True):
        page.screenshot(path=FOLDER / name, timeout=120_000)
        print(name, (FOLDER / name).stat().st_size // 1024, "KB")


def main() -> None:
    """Start everything, wait, take the pictures."""
    program = chromium.find()
    assert program is not None, "no Chromium: `npm ci` in tests/browser brings one"
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder), jobs(), worker_flags=WORKER_FLAGS, pause_s=3.0) as deployment,
        chromium.running(program) as browser,
    ):
        deployment.start(2)
        take(browser, deployment.url)


if __name__ == "__main__":
    main()
