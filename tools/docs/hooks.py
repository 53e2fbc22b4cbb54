"""Hooks of mkdocs for this site: links to files outside `docs/`, and pictures of benchmarks."""

import posixpath
import re
from pathlib import Path
from typing import Any

_RESULTS = re.compile(r"!\[[^\]]*\]\((images/benchmarks/[^)]+)\)\n")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+[^)\s]*)\)")


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
