"""GGUF files of the hub's models, named by the type of their weights: `owner/name:Q4_K_M`."""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from worker_service.errors import ModelNotFound
from worker_service.gguf.header import split_files

_DEFAULT_TYPE = "Q4_K_M"
"""What is chosen among several files if no type is named, as llama.cpp does."""

_OTHER_CONTENT = ("mmproj", "imatrix")
"""In names of GGUF files that hold no model."""

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_EXAMPLES = 8
"""The most names in an error."""


def split_type(model: str) -> tuple[str, str]:
    """The hub id and the type of `owner/name:TYPE`; without a colon the type is empty."""
    hub_id, _, kind = model.partition(":")
    return hub_id, kind


def choose_gguf(model: str, files: Iterable[str]) -> tuple[str, ...]:
    """The parts of the file that `model` names among those of its repository; empty if none of
    these is a GGUF file.

    A type is a part of the file's name between hyphens, dots or slashes, in capitals or not. Raises
    ModelNotFound, which names the files, if none or, without a type, several are meant.
    """
    hub_id, kind = split_type(model)
    found = [
        name
        for name in files
        if name.lower().endswith(".gguf")
        and not any(word in name.lower() for word in _OTHER_CONTENT)
        and _LATER_PART.search(name) is None
    ]
    if not found:
        return ()
    of_type = re.compile(rf"(^|[-./]){re.escape(kind or _DEFAULT_TYPE)}([-./]|$)", re.IGNORECASE)
    meant = found if len(found) == 1 and not kind else list(filter(of_type.search, found))
    if not meant:
        names = ", ".join(sorted(found)[:_EXAMPLES])
        raise ModelNotFound(
            f"{model}: expected the type of one of the hub's files after the id, as in"
            f" {hub_id}:{_DEFAULT_TYPE}; there are {names}"
        )
    # `name-Q4_K_M.gguf` rather than `name-UD-Q4_K_M.gguf`.
    shortest = PurePosixPath(min(meant, key=lambda name: (len(name), name)))
    return tuple(part.as_posix() for part in split_files(Path(shortest)))
