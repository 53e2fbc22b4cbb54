"""Refused requests, with the answers that give the reasons.

Each file in refusals/ holds comments (#) and requests: a method, a path and a JSON body; indented
below each of them is the status, type, code, field and message of the answer. To write the answers
again, and read the difference:

    python -m tests.scheduler_service.frontend.http.test_refusals --rewrite
"""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.http_frontends import HttpServed, http_served
from tests.support.transcripts import commands, transcript

FILES = sorted((Path(__file__).parent / "refusals").glob("*.txt"))


async def answer(served: HttpServed, line: str) -> str:
    """The error that a client gets."""
    method, path, *body = line.split(" ", 2)
    headers = {"content-type": "application/json"} if body else {}
    refused = await served.client.request(method, path, content="".join(body), headers=headers)
    error = refused.json()["error"]
    facts = (refused.status_code, error["type"], error.get("code"), error.get("param"))
    return " ".join([*map(str, facts), f"| {error['message']}"])


async def replay(served: HttpServed, text: str) -> str:
    """The file with the answers that its requests get now."""
    return transcript(text, [[await answer(served, line)] for line in commands(text)])


TEXTS = {file.stem: file.read_text() for file in FILES}


@pytest.mark.parametrize("name", TEXTS)
async def test_a_refused_request_gets_the_answer_in_its_file(served: HttpServed, name: str) -> None:
    assert await replay(served, TEXTS[name]) == TEXTS[name]


async def replay_all() -> list[str]:
    """All files as their requests are answered now."""
    async with http_served() as served:
        return [await replay(served, text) for text in TEXTS.values()]


if __name__ == "__main__":
    assert sys.argv[1:] == ["--rewrite"], __doc__
    for file, text in zip(FILES, asyncio.run(replay_all()), strict=True):
        file.write_text(text)
