"""Hooks of mkdocs for this site: generated pages, and links to files outside `docs/`."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / each) for each in (".", "kernels", "client", "protos")]

from tools.docs import (  # noqa: E402  (after its path is known)
    command_line,
    grpc_reference,
    http_reference,
    metrics_reference,
)

GENERATED = {
    "reference/command-line.md": command_line.render,
    "reference/grpc.md": grpc_reference.render,
    "reference/http.md": http_reference.render,
    "reference/metrics.md": metrics_reference.render,
}
"""Generated pages by path, with the functions that render them."""

_RESULTS = re.compile(r"!\[[^\]]*\]\((images/benchmarks/[^)]+)\)\n")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+[^)\s]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, render in GENERATED.items():
        files.append(File.generated(config, path, content=render()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links to the repository's other files there, or, without an address, keep the text.

    Pictures of benchmarks that have not been run yet are left out.
    """

    def picture(found: re.Match[str]) -> str:
        return found[0] if (Path(config.docs_dir) / found[1]).exists() else ""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/main/{target})" if config.repo_url else link[1]

    return _LINK.sub(replaced, _RESULTS.sub(picture, markdown))
