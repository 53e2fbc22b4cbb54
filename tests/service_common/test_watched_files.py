"""Files that may change while they are in use."""

from pathlib import Path

import pytest

from service_common.cluster import Cluster, ClusterConfig
from service_common.tls import TlsFiles, warn_of_files
from service_common.watched_files import WatchedFiles
from tests.support.certificates import Authority


def test_what_a_changed_file_says_is_in_force_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    number = WatchedFiles([file], lambda: int(file.read_text()))
    assert number.get() == 1
    file.write_text("22")
    assert number.get() == 22


def test_a_file_that_is_no_good_is_told_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    number = WatchedFiles([file], lambda: int(file.read_text()))
    file.write_text("one")
    assert [number.get(), number.get()] == [1, 1]
    assert len(caplog.records) == 1
    file.write_text("333")
    assert number.get() == 333


def test_a_file_that_is_gone_leaves_what_it_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    number = WatchedFiles([file], lambda: int(file.read_text()))
    file.unlink()
    assert number.get() == 1
    file.write_text("22")
    assert number.get() == 22


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_secret_that_others_can_read_is_told(
    mode: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issued = Authority(tmp_path, "authority").issue("public", "127.0.0.1")
    token = tmp_path / "token"
    token.write_text("t" * 32)
    for secret in (issued.key, token):
        secret.chmod(mode)
    warn_of_files(TlsFiles(cert=issued.cert, key=issued.key))
    Cluster(ClusterConfig(token_file=token))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (2 if is_told else 0)
    assert all(f"mode={mode:o}" in line and "t" * 32 not in line for line in told)
