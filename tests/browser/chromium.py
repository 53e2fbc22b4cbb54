"""A Chromium to drive: the registry's (`npm ci` in this folder), or else the system's."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent
MODULES = FOLDER / "node_modules"
AXE = MODULES / "axe-core/axe.min.js"
_SYSTEM = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ["--no-sandbox", "--no-zygote", "--disable-gpu"]


@dataclass(frozen=True)
class Program:
    """A program, and where its libraries are, if they come with it."""

    path: str
    libraries: str | None = None


def find() -> Program | None:
    """The Chromium to use, unpacked at first use; None if there is none."""
    if (MODULES / "@sparticuz/chromium").exists() and shutil.which("node"):
        unpacked = MODULES / ".chromium"
        unpacked.mkdir(exist_ok=True)
        told = subprocess.run(
            ["node", str(FOLDER / "chromium.mjs")],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"TMPDIR": str(unpacked)},
        )
        found = json.loads(told.stdout)
        return Program(found["path"], str(unpacked / "al2023/lib"))
    path = next(filter(None, map(shutil.which, _SYSTEM)), None)
    return Program(path) if path else None


@contextmanager
def running(program: Program) -> Iterator[Browser]:
    """The browser, ended afterwards."""
    env: dict[str, str | float | bool] = dict(os.environ)
    if program.libraries is not None:
        env["LD_LIBRARY_PATH"] = program.libraries
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program.path, args=_FLAGS, env=env, timeout=120_000
        )
        try:
            yield browser
        finally:
            browser.close()
