"""The checked-in code is what the checked-in protos generate, and the protos are well kept."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
CONTRACT = Path(__file__).parent / "contract.binpb"
BUF = Path(sys.executable).with_name("buf")


def buf(*arguments: str, cwd: Path = PROTOS) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BUF), *arguments], cwd=cwd, capture_output=True, text=True)


def test_generated_code_agrees_with_the_protos(tmp_path: Path) -> None:
    names = [str(file.relative_to(PROTOS)) for file in sorted(PROTOS.rglob("*.proto"))]
    services = [name for name in names if name.endswith("_service.proto")]
    scripts = str(Path(sys.executable).parent)
    for outputs, files in (
        (["--python_out", "--mypy_out=quiet:{}"], names),
        (["--grpc_python_out", "--mypy_grpc_out=quiet:{}"], services),
    ):
        flags = [
            flag.format(tmp_path) if "{}" in flag else f"{flag}={tmp_path}" for flag in outputs
        ]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, *files],
            cwd=PROTOS,
            env={"PATH": scripts},
            check=True,
        )
    fresh = {file.name: file.read_text() for file in tmp_path.rglob("*_pb2*")}
    stored = {
        file.name: file.read_text()
        for file in PROTOS.rglob("*_pb2*")
        if file.suffix in {".py", ".pyi"}
    }
    assert sorted(fresh) == sorted(stored)
    assert [name for name in fresh if fresh[name] != stored[name]] == [], "run `make protos`"


def test_protos_pass_buf_lint() -> None:
    run = buf("lint")
    assert run.returncode == 0, run.stdout


def test_protos_are_formatted() -> None:
    run = buf("format", "--diff", "--exit-code")
    assert run.returncode == 0, run.stdout


def test_protos_break_nothing_that_was_stored() -> None:
    run = buf("breaking", "--against", str(CONTRACT))
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_stored_contract_holds_all_that_the_protos_say(tmp_path: Path) -> None:
    fresh = tmp_path / "contract.binpb"
    assert buf("build", "--exclude-source-info", "-o", str(fresh)).returncode == 0
    assert fresh.read_bytes() == CONTRACT.read_bytes(), "run `make protos`"
