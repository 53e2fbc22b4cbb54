"""The generated pages of docs/reference: `python -m tools.docs.reference` writes them."""

from tools.docs import command_line, grpc_reference, http_reference, metrics_reference
from tools.launch import ROOT

PAGES = {
    "docs/reference/command-line.md": command_line.render,
    "docs/reference/grpc.md": grpc_reference.render,
    "docs/reference/http.md": http_reference.render,
    "docs/reference/metrics.md": metrics_reference.render,
}
"""Pages by path from the root, with the functions that render them."""


def main() -> None:
    """Write all pages."""
    for path, render in PAGES.items():
        (ROOT / path).write_text(render())


if __name__ == "__main__":
    main()
