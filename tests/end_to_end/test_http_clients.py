"""Programs that speak HTTP in their own ways, unchanged, against real services.

`make test-clients` installs the packages of Python and npm into `build/http-clients`; Java (17),
curl, HAProxy and nginx are the system's.
"""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster import Cluster
from tests.support.fake_core import FakeCore
from tests.support.http_frontends import http_served
from tests.support.pooling import answering, pooling_model, vector_of
from tests.support.tokenizers import tokens
from tools.launch import ROOT

pytestmark = pytest.mark.long

CLIENTS = Path(__file__).parent / "http_clients"
PACKAGES = ROOT / "build/http-clients"
QUESTION, ANSWER = "What is 27 + 45?", "27 + 45 = 72."
WISH: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
TEXTS = ["one text", "two", "three"]
INSTALL = "make test-clients"


def needs(program: str, how: str) -> str:
    """The path of a program; the test is skipped without it."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs {program}: {how}")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answers_of(*command: str) -> list[str]:
    """The JSON list in the last line that a program prints."""
    return json.loads(run(*command).strip().splitlines()[-1])


def streamed_text(stream: str) -> str:
    """The text of a chat's server-sent events, which end with `[DONE]`."""
    *events, done = re.findall(r"data: (\{.*?\}|\[DONE\])(?=\s*(?:data: |$))", stream)
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("client", ["litellm_client.py", "langchain_client.py", "agents_client.py"])
def test_python_packages_get_the_answer_whole_and_streamed(cluster: Cluster, client: str) -> None:
    python = needs(str(PACKAGES / "bin/python"), INSTALL)
    answers = answers_of(python, str(CLIENTS / client), cluster.http_url(), QUESTION)
    assert set(answers) == {ANSWER}


async def test_clients_of_embeddings_get_the_same_vectors_and_ranks() -> None:
    python = needs(str(PACKAGES / "bin/python"), INSTALL)
    core = FakeCore(models=[pooling_model(matryoshka_dimensions=[0])])
    async with http_served(core) as served, answering(core):
        url = str(served.client.base_url)
        client = str(CLIENTS / "embedding_clients.py")
        found = json.loads(await asyncio.to_thread(run, python, client, url, *TEXTS))
    full = [vector_of([0, *tokens(text)]) for text in TEXTS]
    assert found["full"] == dict.fromkeys(found["full"], full)
    short = [vector[:2] for vector in full]
    assert found["short"] == dict.fromkeys(found["short"], short)
    assert found["int8"] == [[round(127 * x / max(vector)) for x in vector] for vector in full]
    assert found["ranks"] == {client: [0, 1] for client in found["ranks"]}


def test_the_ai_package_of_npm_gets_the_answer_whole_and_streamed(cluster: Cluster) -> None:
    node = needs("node", "install Node.js")
    if not (PACKAGES / "node_modules/ai").exists():
        pytest.skip(f"needs ai and @ai-sdk/openai-compatible: {INSTALL}")
    client = str(CLIENTS / "ai_client.mjs")
    assert answers_of(node, client, cluster.http_url(), QUESTION, str(PACKAGES)) == [ANSWER] * 2


def assert_no_warning(cluster: Cluster) -> None:
    assert "WARNING" not in cluster.frontends[0].log


def test_javas_client_gets_the_answer_whole_and_streamed(cluster: Cluster) -> None:
    java = needs("java", "apt-get install openjdk-17-jdk-headless")
    printed = run(java, str(CLIENTS / "JavaClient.java"), cluster.http_url(), QUESTION)
    *whole, one, other = printed.strip().splitlines()
    assert len(whole) == 2
    for line in whole:
        status, _, body = line.partition(" ")
        assert status == "200"
        assert json.loads(body)["choices"][0]["message"]["content"] == ANSWER
    for line in (one, other):
        assert line.startswith("200 data: ")
        assert streamed_text(line) == ANSWER
    assert_no_warning(cluster)


CURL = {
    "http2": ["--http2"],
    "http2, chunked": ["--http2", "--header", "Transfer-Encoding: chunked"],
    "http1.0": ["--http1.0"],
    "compressed": ["--header", "Content-Encoding: gzip"],
    "expect": ["--header", "Expect: 100-continue"],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", CURL.values(), ids=CURL)
def test_curl_gets_the_answer(
    cluster: Cluster, tmp_path: Path, options: Sequence[str], stream: bool
) -> None:
    curl = needs("curl", "apt-get install curl")
    body = tmp_path / "body"
    body.write_text(json.dumps(WISH | {"stream": stream}))
    if "Content-Encoding: gzip" in options:
        subprocess.run(["gzip", str(body)], check=True)
        body = body.with_suffix(".gz")
    url = f"{cluster.http_url()}/v1/chat/completions"
    header = ["--header", "Content-Type: application/json"]
    told = run(curl, "-sS", "--fail", *options, *header, "--data-binary", f"@{body}", url)
    text = streamed_text(told) if stream else json.loads(told)["choices"][0]["message"]["content"]
    assert text == ANSWER
    assert_no_warning(cluster)


HAPROXY = """
global
  stats socket {folder}/haproxy.sock
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option httpchk GET /health
frontend there
  bind 127.0.0.1:{port}
  default_backend pagewire
backend pagewire
  {settings}
  server one {upstream} check inter 200ms
"""
NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://{upstream};
      {settings}
    }}
  }}
}}
"""
PROXIES: dict[str, tuple[str, str, str, Sequence[str]]] = {
    "haproxy": ("haproxy", HAPROXY, "", ["-f"]),
    "haproxy, connections reused": ("haproxy", HAPROXY, "http-reuse always", ["-f"]),
    "haproxy, clients that leave": ("haproxy", HAPROXY, "option abortonclose", ["-f"]),
    "nginx": ("nginx", NGINX, "", ["-c"]),  # HTTP/1.0
    "nginx, HTTP/1.0 kept": ("nginx", NGINX, 'proxy_set_header Connection "keep-alive";', ["-c"]),
    "nginx, HTTP/1.1": ("nginx", NGINX, "proxy_http_version 1.1;", ["-c"]),
    "nginx, upgrades": (
        "nginx",
        NGINX,
        "proxy_http_version 1.1; proxy_set_header Upgrade h2c; "
        'proxy_set_header Connection "upgrade";',
        ["-c"],
    ),
}


@contextmanager
def proxy(name: str, upstream: str, folder: Path) -> Iterator[str]:
    """Run a proxy before an address, and give its own URL."""
    program, template, settings, flags = PROXIES[name]
    path = needs(program, f"apt-get install {program}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = folder / "proxy.conf"
    values = {"folder": folder, "port": port, "upstream": upstream, "settings": settings}
    file.write_text(template.format(**values))
    process = subprocess.Popen([path, *flags, str(file)], stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_passes_answers_on(cluster: Cluster, tmp_path: Path, name: str) -> None:
    upstream = cluster.http_url().removeprefix("http://")
    with proxy(name, upstream, tmp_path) as url:
        settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}
        with openai.OpenAI(**settings, max_retries=8) as client:
            client.models.list()  # once the proxy listens
        with openai.OpenAI(**settings, max_retries=0) as client:
            for _ in range(3):
                whole = client.chat.completions.create(model="embedded", **WISH)
                assert whole.choices[0].message.content == ANSWER
                chunks = client.chat.completions.create(model="embedded", **WISH, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                assert text == ANSWER
    assert_no_warning(cluster)
