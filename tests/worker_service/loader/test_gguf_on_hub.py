"""GGUF files of the hub's models, which a local server stands for."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.hub import HubHandler
from worker_service.errors import ModelNotFound
from worker_service.loader.files.gguf_on_hub import choose_gguf

FILES = [
    *("README.md", "mmproj-F16.gguf", "imatrix_unsloth.gguf", "Tiny-Q8_0.gguf"),
    *("Tiny-UD-Q4_K_M.gguf", "Tiny-Q4_K_M.gguf", "Tiny-Q4_K_S.gguf"),
    *("BF16/Tiny-BF16-00002-of-00002.gguf", "BF16/Tiny-BF16-00001-of-00002.gguf"),
]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b", ["Tiny-Q4_K_M.gguf"]),
        ("a/b:Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        ("a/b:q8_0", ["Tiny-Q8_0.gguf"]),
        ("a/b:UD-Q4_K_M", ["Tiny-UD-Q4_K_M.gguf"]),
        ("a/b:Tiny-Q4_K_S.gguf", ["Tiny-Q4_K_S.gguf"]),
        ("a/b:BF16", [f"BF16/Tiny-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_a_type_names_one_file(name: str, parts: list[str]) -> None:
    assert choose_gguf(name, FILES) == tuple(parts)


def test_the_only_file_needs_no_type() -> None:
    assert choose_gguf("a/b", ["tiny.gguf", "config.json"]) == ("tiny.gguf",)
    assert choose_gguf("a/b:Q4_K_M", ["config.json", "mmproj.gguf"]) == ()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("a/b:Q4_K", FILES),
        ("a/b:IQ1_S", FILES),
        ("a/b", ["t-Q8_0.gguf", "t-F16.gguf"]),
        ("a/b:F32", ["t-F16.gguf"]),
    ],
)
def test_a_type_that_is_not_there_is_refused_with_those_that_are(
    name: str, files: list[str]
) -> None:
    with pytest.raises(ModelNotFound, match=rf"^{name}: expected the type .* there are .*F16"):
        choose_gguf(name, files)


class Hub(HubHandler):
    """Repositories of one owner, by their files."""

    repositories: ClassVar = {
        "gguf": {"t-Q4_K_M.gguf": b"four", "t-Q8_0.gguf": b"eight", "README.md": b"#"},
        "both": {"config.json": b"{}", "t-Q8_0.gguf": b"eight"},
        "whole": {"config.json": b"{}", "model.safetensors": b"tensors", "t-Q8_0.gguf": b"eight"},
        "none": {"README.md": b"#"},
    }

    def do_HEAD(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            files = self.repositories[parts[3]]
            if "tree" in parts:
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
                return self.answer(200, json.dumps(tree).encode())
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": "/".join(parts[2:4]), "sha": "a" * 40, "siblings": siblings})
            return self.answer(200, body.encode())
        content = self.repositories[parts[1]].get(parts[4]) if parts[0] == "o" else None
        if content is None:
            return self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
        return self.answer(200, content, ETag=f'"{parts[4]}"')

    do_GET = do_HEAD


RESOLVE = """
import sys

from worker_service.errors import ModelNotFound
from worker_service.loader.files.places import resolve_config, resolve_model

for model in sys.argv[1:]:
    try:
        config = resolve_config(model)
        found = resolve_model(model)
        print(config and config.name, found.name if found.is_file() else sorted(
            path.name for path in found.iterdir()))
    except ModelNotFound as error:
        print(error)
"""


def resolved(home: Path, endpoint: str, *models: str, offline: str = "0") -> list[str]:
    """What each model is, in a process whose library reads these variables."""
    return _resolved(home, endpoint, *models, offline=offline)[0]


def _resolved(home: Path, endpoint: str, *models: str, offline: str = "0") -> tuple[list[str], str]:
    """The same, and the log."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *models],
        env=os.environ
        | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_XET": "1"}
        | {"HF_HUB_OFFLINE": offline},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_files_of_the_hub_are_downloaded_and_then_found_without_it(tmp_path: Path) -> None:
    models = ["o/gguf", "o/gguf:Q8_0", "o/both", "o/whole", "o/whole:Q8_0"]
    expected = [
        "None t-Q4_K_M.gguf",
        "None t-Q8_0.gguf",
        f"{'a' * 40} t-Q8_0.gguf",
        f"{'a' * 40} ['config.json', 'model.safetensors']",
        "None t-Q8_0.gguf",
    ]
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        *found, unknown, without, neither = resolved(
            tmp_path, endpoint, *models, "o/gguf:F16", "o/none:F16", "o/none"
        )
        hub.shutdown()
        thread.join()
    assert found == expected
    assert unknown.startswith("o/gguf:F16: expected the type of one of the hub's files")
    assert without == "o/none:F16: o/none is on the Hugging Face hub, but has no GGUF file"
    assert neither.startswith("o/none: on the Hugging Face hub, but with neither a config.")
    later = resolved(tmp_path, endpoint, *models, offline="1")
    assert [line.partition(" ")[2] for line in later[:3]] == ["t-Q4_K_M.gguf"] + 2 * ["t-Q8_0.gguf"]
    assert all(line.startswith("None ") for line in later), "no newer config.json is read"


def test_a_hub_that_does_not_answer_is_not_waited_for_if_its_cache_has_the_model(
    tmp_path: Path,
) -> None:
    models = ["o/gguf:Q8_0", "o/whole"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        resolved(tmp_path, f"http://127.0.0.1:{hub.server_port}", *models)
        hub.shutdown()
        thread.join()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found, log = _resolved(tmp_path, endpoint, *models)
    assert found == ["None t-Q8_0.gguf", "None ['config.json', 'model.safetensors']"]
    for hub_id in ("o/gguf", "o/whole"):
        place = f"model={hub_id} endpoint={endpoint}"
        assert log.count(f"using its local cache, which may be older or incomplete {place}") == 1
