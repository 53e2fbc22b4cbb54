"""Nothing of a deployment is left behind, even if it is killed."""

import subprocess
import sys
from pathlib import Path

from pagewire_cli.local.runtime_directory import RuntimeDirectory

HOLD = """
import sys
from pathlib import Path
from pagewire_cli.local.runtime_directory import RuntimeDirectory
folder = RuntimeDirectory(Path(sys.argv[1]))
(folder.path / "core.sock").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_only_this_user_can_enter(tmp_path: Path) -> None:
    folder = RuntimeDirectory(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_processs_folder_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        RuntimeDirectory(tmp_path).remove()
        assert (theirs / "core.sock").exists(), "its process lives"
        holder.kill()
        holder.wait()
        ours = RuntimeDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == [ours.path]
    ours.remove()


def test_folders_of_others_are_let_be(tmp_path: Path) -> None:
    strangers = [tmp_path / "pagewire-checkpoints", tmp_path / "other"]
    for folder in strangers:
        folder.mkdir()
    RuntimeDirectory(tmp_path).remove()
    assert sorted(tmp_path.iterdir()) == sorted(strangers)


def test_a_deep_folder_for_temporary_files_is_left_for_a_shallow_one(
    tmp_path: Path,
) -> None:
    code = (
        "from pagewire_cli.local.runtime_directory import RuntimeDirectory\n"
        "folder = RuntimeDirectory()\n"
        "print(folder.path.parent)\n"
        "folder.remove()"
    )
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(deep)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "/tmp"
