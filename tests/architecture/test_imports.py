"""Arrows between the packages point one way; see docs/architecture.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PACKAGES = {
    "pagewire": ROOT / "protos/pagewire",
    "pagewire_kernels": ROOT / "kernels/pagewire_kernels",
    "worker_service": ROOT / "worker_service",
    "scheduler_service": ROOT / "scheduler_service",
    "pagewire_client": ROOT / "client/pagewire_client",
    "pagewire_cli": ROOT / "client/pagewire_cli",
    "service_common": ROOT / "service_common",
    "conformance": ROOT / "conformance",
}
OURS = set(PACKAGES)
TENSOR_LIBRARIES = {"torch", "triton", "transformers", "safetensors"}
WIRE_LIBRARIES = {"grpc", "google", "grpc_health", "grpc_reflection", "grpc_status"}

FORBIDDEN = {
    "pagewire": OURS - {"pagewire"} | TENSOR_LIBRARIES,
    "pagewire_kernels": OURS - {"pagewire_kernels"} | WIRE_LIBRARIES | {"transformers"},
    "worker_service": {"scheduler_service", "pagewire_client", "pagewire_cli"},
    "scheduler_service": {"worker_service", "pagewire_client", "pagewire_cli", "pagewire_kernels"}
    | TENSOR_LIBRARIES,
    # Its `LLM` starts services.
    "pagewire_client": OURS - {"pagewire_client", "pagewire", "pagewire_cli"}
    | TENSOR_LIBRARIES
    | {"numpy"},
    "pagewire_cli": OURS - {"pagewire_client", "pagewire", "pagewire_cli"}
    | TENSOR_LIBRARIES
    | {"numpy"},
    "service_common": OURS - {"service_common", "pagewire"} | TENSOR_LIBRARIES,
    "conformance": OURS - {"conformance", "pagewire"} | TENSOR_LIBRARIES | {"numpy"},
}

LAZY = {(PACKAGES["pagewire_client"] / "pooling.py", "numpy")}
"""Imports that a package needs for some results only, and makes when it returns one;
tests/client/test_light_install.py runs without them."""


def imported_roots(file: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every absolute import anywhere in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def test_service_common_uses_no_messages() -> None:
    for file in PACKAGES["service_common"].rglob("*.py"):
        assert "pagewire.v1" not in {
            node.module
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom)
        }, file


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may_know(package: str) -> None:
    files = list(PACKAGES[package].rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imported_roots(file)
        if name in FORBIDDEN[package] and (file, name) not in LAZY
    ]
    assert wrong == []


def test_the_pure_core_knows_neither_protobuf_nor_an_event_loop() -> None:
    forbidden = WIRE_LIBRARIES | {"pagewire", "asyncio", "time", "random", "threading", "socket"}
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in (PACKAGES["scheduler_service"] / "core").rglob("*.py")
        for line, name in imported_roots(file)
        if name in forbidden
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("scheduler_service.__main__", ["torch", "transformers", "worker_service"]),
        ("scheduler_service.frontend.server", ["torch", "transformers", "worker_service"]),
        ("scheduler_service.core_service.service", ["torch", "tokenizers", "pydantic"]),
        ("worker_service.gguf.__main__", ["torch", "transformers", "gguf", "grpc", "typer"]),
        ("pagewire_cli", ["torch", "transformers", "numpy", "scheduler_service"]),
        ("conformance.__main__", ["torch", "numpy", "scheduler_service", "worker_service"]),
    ],
)
def test_a_role_starts_without_the_libraries_of_another(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    path = ":".join(str(ROOT / root) for root in (".", "kernels", "client", "protos"))
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
