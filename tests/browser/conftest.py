"""One browser, and one deployment under a constant load, for all tests of a file.

Not longer: a browser keeps an event loop running in its thread, where other tests need their own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request

from pagewire_client import SamplingParams
from tests.browser import chromium
from tests.browser.deployment import Deployment, Job

SHARED = list(range(100, 196))
"""96 tokens, six blocks, with which four of the prompts begin."""

OpenPage = Callable[..., Page]


def jobs() -> list[Job]:
    """Four requests that share a prefix, one of two choices, two more of their own."""
    long = SamplingParams(max_tokens=3_000, ignore_eos=True)
    both = SamplingParams(max_tokens=3_000, ignore_eos=True, n=2, temperature=1.0)
    prompts = [[*SHARED, *range(200 + 20 * i, 210 + 20 * i)] for i in range(4)]
    own = [(list(range(1_000 + 100 * i, 1_040 + 100 * i)), long) for i in range(2)]
    return [*((prompt, long) for prompt in prompts), (list(range(500, 540)), both), *own]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium: `npm ci` in tests/browser installs one")
    with chromium.running(program) as browser:
        yield browser


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    flags = ["--simulate-step-us", "250000", "--simulate-gpu-blocks", "512"]
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder, jobs(), worker_flags=flags) as deployment:
        deployment.start(1)
        yield deployment


@pytest.fixture
def open_page(browser: Browser, deployment: Deployment) -> Iterator[OpenPage]:
    """Opens the dashboard and waits for requests; fails on console errors or foreign requests."""
    problems: list[str] = []
    contexts = []

    def note_request(request: Request) -> None:
        if not request.url.startswith(deployment.url):
            problems.append(f"asked for {request.url}")

    def open_page(width: int = 1280, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", note_request)
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(deployment.url)
        page.locator("#requests tbody tr:not(.ended)").nth(6).wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
