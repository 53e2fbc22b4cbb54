"""Hooks of mkdocs for this site: links to files outside `docs/`."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links to the repository's other files there, or, without an address, keep the text."""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/main/{target})" if config.repo_url else link[1]

    return _LINK.sub(replaced, markdown)
