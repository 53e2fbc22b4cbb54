"""The checked-in code is what the checked-in protos generate, and the protos are well kept."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uint64 step_id = 2;", "uint32 step_id = 2;"),
        ("uint64 step_id = 2;", "uint64 step_id = 200;"),
        ("repeated NewSequence new_sequences = 7;", ""),
        ("ROW_ERROR_REASON_NO_CANDIDATES = 2;", "ROW_ERROR_REASON_NONE_LEFT = 2;"),
    ],
)
def test_a_breaking_change_is_caught(tmp_path: Path, old: str, new: str) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy, ignore=shutil.ignore_patterns("*.py", "*.pyi", "__pycache__"))
    plan = copy / "pagewire/v1/plan.proto"
    assert old in plan.read_text()
    plan.write_text(plan.read_text().replace(old, new, 1))
    assert buf("breaking", "--against", str(CONTRACT), cwd=copy).returncode != 0
