"""Commands of the documentation that write secrets keep them from other users of the machine."""

import re

from tools.launch import ROOT

BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECRET = re.compile(r"openssl rand|-keyout|openssl genrsa")


def test_commands_that_write_a_secret_come_after_umask_077() -> None:
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in BLOCK.findall(page.read_text()):
            if secret := SECRET.search(block):
                found.append(page.name)
                assert "umask 077\n" in re.sub(r" +#.*", "", block[: secret.start()]), block
    assert found.count("security.md") >= 2
