"""What mkdocs does for this site beyond its plugins: generated pages, links that leave `docs/`."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / each) for each in (".", "kernels", "client", "protos")]

from tools.docs import command_line, grpc_reference, http_reference  # noqa: E402  (after its path is known)

GENERATED = {
    "reference/command-line.md": command_line.render,
    "reference/grpc.md": grpc_reference.render,
    "reference/http.md": http_reference.render,
}
"""Pages by where they are, and what makes them."""

ANNOUNCED = {
    "dashboard.md",
    "observability.md",
    "openai-api.md",
    "security.md",
    "structured-output.md",
}
"""Pages that have a place in the navigation, and links, before they are written."""

_RESULTS = re.compile(r"!\[[^\]]*\]\((images/benchmarks/[^)]+)\)\n")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+[^)\s]*)\)")


def on_config(config: Any) -> Any:
    """Leave out of the navigation what is announced and not there yet."""
    config.nav = _without(config.nav, _missing(config))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of the programs and protos."""
    for path, render in GENERATED.items():
        files.append(File.generated(config, path, content=render()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links to the repository's other files there, or, where no address is set, nowhere.

    So with pages that are announced, and with pictures of benchmarks that nobody has run yet.
    """
    missing = _missing(config)

    def picture(found: re.Match[str]) -> str:
        return found[0] if (Path(config.docs_dir) / found[1]).exists() else ""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", link[2]))
        page_of_ours, _, _ = target.removeprefix("docs/").partition("#")
        if page_of_ours in missing:
            return link[1]
        if target.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/main/{target})" if config.repo_url else link[1]

    return _LINK.sub(replaced, _RESULTS.sub(picture, markdown))


def _missing(config: Any) -> set[str]:
    return {page for page in ANNOUNCED if not (Path(config.docs_dir) / page).exists()}


def _without(entries: list[Any], missing: set[str]) -> list[Any]:
    """The navigation, or a section of it, without these pages."""
    kept = []
    for entry in entries:
        if isinstance(entry, dict):
            (name, inner), *_ = entry.items()
            if isinstance(inner, list):
                kept.append({name: _without(inner, missing)})
            elif inner not in missing:
                kept.append(entry)
        elif entry not in missing:
            kept.append(entry)
    return kept
