"""Certificates of services."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import make_frontend
from service_common.cluster import Cluster, ClusterConfig
from service_common.tls import TlsFiles
from tests.support.certificates import Authority


@pytest.mark.parametrize(
    ("begins", "days", "is_told"), [(-10, 1, False), (-10, -1, True), (1, 2, True)]
)
@pytest.mark.parametrize("use", ["a member's", "a frontend's"])
async def test_a_certificate_that_is_not_valid_now_is_told_at_start(
    use: str,
    begins: int,
    days: int,
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("own", "llm.example", begins=begins, days=days)
    issued.key.chmod(0o600)
    if use == "a member's":
        Cluster(ClusterConfig(ca=authority.cert, cert=issued.cert, key=issued.key))
    else:
        make_frontend(FrontendConfig(tls=TlsFiles(cert=issued.cert, key=issued.key)))
    told = [line for line in caplog.messages if line.startswith("certificate is not valid now")]
    assert len(told) == is_told
    for line in told:
        words = dict(word.split("=") for word in line.split()[5:])
        assert (words["file"], words["subject"]) == (str(issued.cert), "'llm.example'")
        now = datetime.now(UTC)
        for name, expected in (("not_before", begins), ("not_after", days)):
            distance = datetime.fromisoformat(words[name]) - now - timedelta(days=expected)
            assert abs(distance) < timedelta(minutes=10)


def test_a_key_of_another_certificate_is_an_error_that_names_both(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(
        ValueError,
        match=f"^tls: {one.cert} and {other.key} are not a certificate and its key: .*MISMATCH",
    ):
        TlsFiles(cert=one.cert, key=other.key)
