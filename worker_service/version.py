"""Which version of Pagewire this is."""

from importlib import metadata


def version() -> str:
    """The installed distribution's version; `unknown` in a plain checkout."""
    try:
        return metadata.version("pagewire")
    except metadata.PackageNotFoundError:
        return "unknown"
