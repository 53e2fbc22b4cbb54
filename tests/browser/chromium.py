"""A Chromium to drive: the registry's (`npm ci` in this folder), or else the system's."""

import fcntl
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
    """A program, and the directory of its bundled libraries, if any."""

    path: str
    libraries: str | None = None


def find() -> Program | None:
    """The Chromium to use, unpacked at first use; None if there is none."""
    if (MODULES / "@sparticuz/chromium").exists() and shutil.which("node"):
        unpacked = MODULES / ".chromium"
        unpacked.mkdir(exist_ok=True)
        with (unpacked / "lock").open("w") as lock:  # test processes may start at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _unpack(unpacked)
    path = next(filter(None, map(shutil.which, _SYSTEM)), None)
    return Program(path) if path else None


def _unpack(folder: Path) -> Program:
    """The registry's Chromium, unpacked if necessary."""
    told = subprocess.run(
        ["node", str(FOLDER / "chromium.mjs")],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    return Program(json.loads(told.stdout)["path"], str(folder / "al2023/lib"))


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
