"""The version of this software, as installed."""

from importlib import metadata


def _installed_version() -> str:
    try:
        return metadata.version("pagewire")
    except metadata.PackageNotFoundError:
        return "unknown"


VERSION = _installed_version()
"""`unknown` in a checkout that is not installed."""
