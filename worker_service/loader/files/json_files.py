"""Reading JSON files of a model."""

import json
from pathlib import Path
from typing import Any

from worker_service.errors import BadCheckpoint, InvalidOption


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises BadCheckpoint if there is none."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} holds no JSON object")
    return content


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON file. Raises BadCheckpoint if it is no list of objects."""
    content = _read_json(path)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise BadCheckpoint(f"{path} holds no list of JSON objects")
    return content


def parse_object(option: str, text: str) -> dict[str, Any]:
    """Return the JSON object that an option has as its value. Raises InvalidOption."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"{option}: expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(content, dict):
        raise InvalidOption(f"{option}: expected a JSON object, got {text}")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_with_floats)
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing") from error
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from error


def _with_floats(item: dict[str, Any]) -> Any:
    """An object; of one that stands for a number that JSON does not have, as `transformers` writes
    them (`{"__float__": "Infinity"}`), that number."""
    return float(item["__float__"]) if item.keys() == {"__float__"} else item
