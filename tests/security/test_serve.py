"""`pagewire serve` with everything that keeps strangers out, and clients of all kinds at it."""

import asyncio
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from pagewire_cli.app import app
from pagewire_client import Client, RetryPolicy, SamplingParams, TlsOptions
from pagewire_client.errors import NotAuthorized, Unavailable
from tests.client.cli.test_serve import serving
from tests.client.test_node_client import NODE_CLIENT
from tests.security.test_links import TOKEN, files, running_core
from tests.support.certificates import Authority, Issued
from tests.support.checkpoints import checkpoint
from tools.launch import free_port

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ONCE = RetryPolicy(max_retries=0)


@dataclass(frozen=True)
class Guarded:
    """A deployment, and what its clients have to show."""

    address: str
    http: str
    authority: Authority
    friend: Issued
    key: str
    operator_key: str

    @contextmanager
    def client(self, issued: Issued | None, key: str | None) -> Iterator[Client]:
        tls = TlsOptions(
            root_certificates=self.authority.cert,
            certificate_chain=issued and issued.cert,
            private_key=issued and issued.key,
        )
        with Client(self.address, tls=tls, api_key=key, retry=ONCE) as client:
            yield client


def new_key(file: Path, *flags: str) -> str:
    """A key, whose table is added to the file."""
    made = CliRunner().invoke(app, ["key", "new", *flags])
    assert made.exit_code == 0
    with file.open("a") as keys:
        keys.write(made.stdout)
    (key,) = (word for word in made.stderr.split() if word.startswith("pw-"))
    return key


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder, "authority")
    public, member = authority.issue("public", "127.0.0.1"), authority.issue("member")
    (folder / "token").write_text(TOKEN)
    keys = folder / "keys.toml"
    key = new_key(keys, "--tenant", "somebody")
    operator_key = new_key(keys, "--tenant", "ops", "--operator")
    address, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = {
        "listen": address,
        "http": http,
        "api-keys": keys,
        "tls-cert": public.cert,
        "tls-key": public.key,
        "tls-client-ca": authority.cert,
        "cluster-token-file": folder / "token",
        "cluster-ca": authority.cert,
        "cluster-cert": member.cert,
        "cluster-key": member.key,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    with serving(*arguments, model=str(checkpoint("llama"))) as serve:
        serve.wait_for("serving")
        friend = authority.issue("friend", "friend")
        yield Guarded(address, http, authority, friend, key, operator_key)


def test_a_client_with_certificate_and_key_is_served(guarded: Guarded) -> None:
    with guarded.client(guarded.friend, guarded.key) as client:
        assert len(client.generate("Hello", SHORT).outputs[0].token_ids) == 4


def test_a_client_without_its_key_is_refused(guarded: Guarded) -> None:
    for key in (None, "pw-" + "x" * 40):
        with guarded.client(guarded.friend, key) as client, pytest.raises(NotAuthorized):
            client.generate("Hello", SHORT, timeout=30)


def test_a_client_without_its_certificate_is_refused(guarded: Guarded) -> None:
    with guarded.client(None, guarded.key) as client, pytest.raises(Unavailable):
        client.generate("Hello", SHORT, timeout=30)


@pytest.mark.parametrize("has_certificate", [True, False])
def test_http_asks_for_both_too(guarded: Guarded, has_certificate: bool) -> None:
    context = ssl.create_default_context(cafile=guarded.authority.cert)
    if has_certificate:
        context.load_cert_chain(guarded.friend.cert, guarded.friend.key)
    url = f"https://{guarded.http}/v1/models"
    with httpx.Client(verify=context, timeout=30, trust_env=False) as client:
        if not has_certificate:
            with pytest.raises(httpx.TransportError):
                client.get(url)
            return
        assert client.get(url).status_code == 401
        answer = client.get(url, headers={"authorization": f"Bearer {guarded.key}"})
        assert len(answer.json()["data"]) == 1


def run_node(guarded: Guarded, *arguments: str, key: str) -> "subprocess.CompletedProcess[str]":
    command = ["node", "examples/generate.js", "--address", guarded.address, "--max-tokens", "4"]
    return subprocess.run(
        [*command, "--recovery-timeout", "0", "--tls-ca", str(guarded.authority.cert), *arguments],
        cwd=NODE_CLIENT,
        env=os.environ | {"PAGEWIRE_API_KEY": key, "NODE_NO_WARNINGS": "1"},  # of an IP address
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_node_client_shows_its_certificate_and_key(guarded: Guarded) -> None:
    friend = guarded.friend
    shown = ["--tls-cert", str(friend.cert), "--tls-key", str(friend.key), "Hello"]
    served = run_node(guarded, *shown, key=guarded.key)
    assert (served.returncode, served.stderr) == (0, "")
    unknown = run_node(guarded, *shown, key="pw-unknown")
    assert (unknown.returncode, unknown.stderr) == (1, "error: unknown API key\n")
    stranger = run_node(guarded, "Hello", key=guarded.key)
    assert stranger.returncode == 1
    assert stranger.stderr.startswith("error: ")


@pytest.mark.parametrize("is_operator", [True, False])
def test_the_state_is_shown_to_operators(guarded: Guarded, is_operator: bool) -> None:
    friend = guarded.friend
    arguments = ["top", "--once", "--interval", "0.1", "--address", guarded.address]
    arguments += ["--tls-ca", str(guarded.authority.cert)]
    arguments += ["--tls-cert", str(friend.cert), "--tls-key", str(friend.key)]
    arguments += ["--api-key", guarded.operator_key if is_operator else guarded.key]
    told = CliRunner().invoke(app, arguments)
    if is_operator:
        assert (told.exit_code, "worker-0" in told.output) == (0, True), told.output
    else:
        assert told.exit_code != 0


@pytest.mark.parametrize("is_member", [True, False])
async def test_commands_that_ask_a_core_are_members_of_its_cluster(
    tmp_path: Path, is_member: bool
) -> None:
    authority = Authority(tmp_path, "authority")
    member, token = authority.issue("member"), tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    credentials = files(authority.cert, member, token)
    shown = []
    if is_member:
        shown += ["--cluster-token-file", str(token), "--cluster-ca", str(authority.cert)]
        shown += ["--cluster-cert", str(member.cert), "--cluster-key", str(member.key)]
    async with running_core(**credentials) as core:

        def run(*arguments: str) -> tuple[int, str]:
            ran = CliRunner().invoke(app, [*arguments, "--core", core.address, *shown])
            return ran.exit_code, f"{ran.output}{ran.exception}"

        code, said = await asyncio.to_thread(run, "top", "--once", "--interval", "0.1")
        assert (code == 0) == is_member, said
        code, said = await asyncio.to_thread(run, "drain", "nobody")
        assert code == 1
        assert ("no worker group 'nobody'" in said) == is_member, said
