"""API keys and clusters' tokens, which calls present as `authorization: Bearer TOKEN`."""

import re
from pathlib import Path

_VISIBLE = re.compile("[!-~]+")


def is_bearer_token(text: str) -> bool:
    """Whether `text` consists of visible ASCII characters, as gRPC's metadata and HTTP's headers
    require."""
    return _VISIBLE.fullmatch(text) is not None


def read_tokens(path: Path) -> list[str]:
    """The tokens of a file, at least one: the first is sent, any is accepted. Raises ValueError
    that names the file and contains no token."""
    try:
        tokens = path.read_bytes().decode("ascii").split()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        tokens = [""]  # not chained: that error quotes the file
    if not tokens:
        raise ValueError(f"{path}: expected a token, got an empty file")
    if not all(map(is_bearer_token, tokens)):
        raise ValueError(f"{path}: expected visible ASCII characters")
    return tokens
