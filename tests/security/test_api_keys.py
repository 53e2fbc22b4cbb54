"""Callers of a frontend are known by their keys, and find nothing that is another tenant's."""

import logging
import os
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_cli.app import app
from scheduler_service.errors import Unauthenticated
from scheduler_service.frontend.auth import ApiKeys, Principal, hash_of, read_keys
from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import authentication_of
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import (
    client_of,
    error_info,
    error_of,
    generate_request,
    model_ready,
    read_all,
    running_frontend,
)

ONE, TWO, OLD, NARROW, BOSS = (f"pw-{name}-{'x' * 32}" for name in ("1", "2", "o", "n", "b"))


def as_caller(key: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


def entry(key: str, tenant: str, more: str = "") -> str:
    return f'[[key]]\nsha256 = "{hash_of(key)}"\ntenant = "{tenant}"\n{more}\n'


def replace_file(path: Path, text: str) -> None:
    """At once, as an operator should."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def remove(path: Path) -> None:
    path.unlink()


KEYS = (
    entry(ONE, "one")
    + entry(TWO, "two")
    + entry(OLD, "one", "expires = 2020-01-01")
    + entry(NARROW, "one", 'models = ["other"]')
    + entry(BOSS, "ops", "operator = true")
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


@asynccontextmanager
async def guarded(keys: Path) -> Any:
    async with (
        FakeCore() as core,
        running_frontend(core.address, api_keys=keys) as frontend,
        client_of(frontend) as client,
    ):
        await model_ready(frontend)
        yield core, frontend, client


CALLS = {
    "Generate": generate_request(),
    "Abort": pb.AbortRequest(request_id="r"),
    "Tokenize": pb.TokenizeRequest(text="a"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[5]),
    "GetModel": pb.GetModelRequest(),
    "GetStatus": pb.GetStatusRequest(),
    "WatchStatus": pb.WatchStatusRequest(),
    "LoadAdapter": pb.LoadAdapterRequest(name="a", path="/a"),
    "UnloadAdapter": pb.UnloadAdapterRequest(name="a"),
    "ListAdapters": pb.ListAdaptersRequest(),
}
POOLING = {
    "Embed": pb.EmbedRequest,
    "Score": pb.ScoreRequest,
    "Rank": pb.RankRequest,
    "Classify": pb.ClassifyRequest,
}
STREAMING = ("GenerateMany", *POOLING)
"""Those whose requests are streams."""


def test_every_method_is_among_those_tried() -> None:
    methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    assert set(methods) == {*CALLS, *STREAMING}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "NO_API_KEY"),
        ((("authorization", "Basic abc"),), "NO_API_KEY"),
        (as_caller("pw-unknown"), "UNKNOWN_API_KEY"),
        (as_caller(""), "UNKNOWN_API_KEY"),
        (as_caller(OLD), "EXPIRED_API_KEY"),
    ],
)
async def test_no_call_is_taken_without_a_good_key(
    keys: Path, metadata: Sequence[tuple[str, str]], reason: str
) -> None:
    async with guarded(keys) as (_, frontend, client):
        calls = [getattr(client, rpc)(request, metadata=metadata) for rpc, request in CALLS.items()]
        calls += [getattr(client, rpc)(metadata=metadata) for rpc in STREAMING]
        for call in calls:
            error = await error_of(call)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert error_info(error).reason == reason
        assert len(frontend.requests) == 0


async def test_a_key_makes_a_request_its_tenants(keys: Path) -> None:
    async with guarded(keys) as (core, _, client):
        for key, tenant in ((ONE, "one"), (TWO, "two")):
            call = client.Generate(generate_request(), metadata=as_caller(key))
            request = await core.next_request()
            assert request.submit.tenant == tenant
            await request.complete([5])
            await read_all(call)


async def test_a_key_may_also_come_as_x_api_key(keys: Path) -> None:
    async with guarded(keys) as (_, _, client):
        await client.GetModel(pb.GetModelRequest(), metadata=(("x-api-key", ONE),))


async def test_tenants_neither_see_nor_end_nor_block_each_others_requests(keys: Path) -> None:
    async with guarded(keys) as (core, frontend, client):
        mine = client.Generate(generate_request(request_id="r"), metadata=as_caller(ONE))
        request = await core.next_request()
        error = await error_of(
            client.Abort(pb.AbortRequest(request_id="r"), metadata=as_caller(TWO))
        )
        assert error.code() == grpc.StatusCode.NOT_FOUND
        same_id = client.Generate(generate_request(request_id="r"), metadata=as_caller(TWO))
        other = await core.next_request()
        await other.complete([5])
        await read_all(same_id)
        await request.complete([6])
        assert (await read_all(mine))[-1].request_id == "r"
        assert len(frontend.requests) == 0


async def test_a_key_is_good_for_its_models_only(keys: Path) -> None:
    async with guarded(keys) as (_, _, client):
        calls = []
        for rpc in ("Generate", "Tokenize", "Detokenize", "GetModel"):
            request = type(CALLS[rpc])()
            request.CopyFrom(CALLS[rpc])
            request.model = model_info().name
            calls.append(getattr(client, rpc)(request, metadata=as_caller(NARROW)))
        for rpc, message in POOLING.items():
            request = message(options=pb.PoolingOptions(model=model_info().name))
            calls.append(getattr(client, rpc)(iter([request]), metadata=as_caller(NARROW)))
        for call in calls:
            error = await error_of(call)
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
            assert error_info(error).reason == "MODEL_NOT_ALLOWED"


async def test_only_operators_see_the_state_of_the_deployment(keys: Path) -> None:
    async with guarded(keys) as (_, _, client):
        for call in (
            client.GetStatus(pb.GetStatusRequest(), metadata=as_caller(ONE)),
            client.WatchStatus(pb.WatchStatusRequest(), metadata=as_caller(ONE)),
        ):
            error = await error_of(call)
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        await client.GetStatus(pb.GetStatusRequest(), metadata=as_caller(BOSS))


async def test_a_revoked_key_stops_new_requests_at_once_on_open_streams_too(keys: Path) -> None:
    async with guarded(keys) as (core, _, client):
        many = client.GenerateMany(metadata=as_caller(ONE))
        first = generate_request(request_id="first")
        await many.write(pb.GenerateManyRequest(request=first))
        request = await core.next_request()
        await request.accept()
        assert (await many.read()).response.request_id == "first"
        replace_file(keys, entry(TWO, "two"))
        error = await error_of(client.GetModel(pb.GetModelRequest(), metadata=as_caller(ONE)))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        second = generate_request(request_id="second")
        await many.write(pb.GenerateManyRequest(request=second))
        refused = (await many.read()).error
        assert (refused.request_id, refused.code) == ("second", 16)
        await request.complete([5])
        while not (response := (await many.read()).response).HasField("usage"):
            assert response.request_id == "first"
        many.cancel()


async def test_a_broken_file_leaves_the_keys_in_force_and_says_so(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(keys) as (_, _, client):
        replace_file(keys, "this is no TOML")
        await client.GetModel(pb.GetModelRequest(), metadata=as_caller(ONE))
        assert "reload failed; keeping the previous contents" in caplog.text
        remove(keys)
        await client.GetModel(pb.GetModelRequest(), metadata=as_caller(ONE))
        replace_file(keys, entry(TWO, "two"))
        await client.GetModel(pb.GetModelRequest(), metadata=as_caller(TWO))


async def test_no_key_is_ever_logged(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(keys) as (core, _, client):
        call = client.Generate(generate_request(request_id="mine"), metadata=as_caller(ONE))
        await (await core.next_request()).complete([5])
        await read_all(call)
        for key in ("pw-unknown", OLD):
            await error_of(client.GetModel(pb.GetModelRequest(), metadata=as_caller(key)))
        replace_file(keys, KEYS + "broken")
        await client.GetModel(pb.GetModelRequest(), metadata=as_caller(ONE))
    assert "listening" in caplog.text
    for key in (ONE, OLD, "pw-unknown", hash_of(ONE)):
        assert key not in caplog.text


async def test_one_key_is_enough_where_there_are_no_tenants() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, api_key=[ONE]) as frontend,
        client_of(frontend) as client,
    ):
        await model_ready(frontend)
        await client.GetStatus(pb.GetStatusRequest(), metadata=as_caller(ONE))
        error = await error_of(client.GetModel(pb.GetModelRequest(), metadata=as_caller(TWO)))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_key_expires_at_its_very_second(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry(ONE, "one", "expires = 2030-01-01T00:00:00+01:00"))
    now = 1893452400.0  # 2029-12-31T23:00:00Z
    keys = read_keys(path)
    assert ApiKeys(lambda: keys, lambda: now - 1).authenticate(f"bearer {ONE}").name == "one"
    with pytest.raises(Unauthenticated):
        ApiKeys(lambda: keys, lambda: now).authenticate(f"Bearer {ONE}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "x: Extra inputs"),
        ("key = 1", "key: Input should be a valid list"),
        ("key = [1]", "key 1: Input should be a valid dictionary"),
        ('[[key]]\ntenant = "a"', "key 1 sha256"),
        (f'[[key]]\nsha256 = "{ONE}"\ntenant = "a"', "key 1 sha256"),
        (entry(ONE, "a b"), "key 1 tenant"),
        (entry(ONE, ""), "key 1 tenant"),
        (entry(ONE, "a") + entry(ONE, "b"), "key 2: duplicate key"),
        (entry(ONE, "a", "models = 1"), "key 1 models"),
        (entry(ONE, "a", "expires = 1"), "key 1 expires"),
        (entry(ONE, "a", "operator = 1"), "key 1 operator"),
        (entry(ONE, "a", "tennant = 1"), "key 1 tennant: Extra inputs"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_number_and_never_quoted(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert ONE not in str(caught.value)


def test_a_file_without_keys_is_an_error_at_start(keys: Path) -> None:
    keys.write_text("# none yet\n")
    with pytest.raises(ValueError, match=f"^api_keys: {keys}: expected at least one key, got none"):
        FrontendConfig(api_keys=keys)


def test_the_last_key_can_be_revoked_which_is_told(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authentication = authentication_of(FrontendConfig(api_keys=keys))
    assert authentication.authenticate(f"Bearer {ONE}").name == "one"
    replace_file(keys, "")
    with pytest.raises(Unauthenticated, match="unknown API key"):
        authentication.authenticate(f"Bearer {ONE}")
    assert f"no API keys are left, so every call is refused file={keys}" in caplog.messages


def test_what_the_command_draws_is_read_as_it_was_asked_for(tmp_path: Path) -> None:
    model = 'a "llama"\n\\'
    flags = ["--tenant", "team.a", "--model", model, "--expires", "2099-01-01", "--operator"]
    flags += ["--lora-module", "sql", "--lora-module", "support"]
    path = tmp_path / "keys.toml"
    path.write_text(CliRunner().invoke(app, ["key", "new", *flags]).stdout)
    (key,) = read_keys(path).values()
    assert key.tenant == Principal(
        name="team.a",
        models=frozenset({model}),
        lora_modules=frozenset({"sql", "support"}),
        is_operator=True,
    )
    assert key.expires == 4070908800.0  # 2099-01-01T00:00:00Z


@pytest.mark.parametrize("tenant", ["a b", "", "é", "x" * 65])
def test_no_key_is_drawn_for_a_tenant_that_frontends_would_refuse(tenant: str) -> None:
    refused = CliRunner().invoke(app, ["key", "new", "--tenant", tenant])
    assert refused.exit_code == 2
    assert refused.stdout == ""


@pytest.mark.parametrize("flag", ["--model", "--lora-module"])
def test_no_key_is_drawn_for_a_name_that_is_empty(flag: str) -> None:
    refused = CliRunner().invoke(app, ["key", "new", "--tenant", "one", flag, ""])
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert f"{flag}: expected a name, got an empty text" in refused.stderr


@pytest.mark.parametrize(
    ("expires", "words"),
    [
        ("2020-01-01", "expected a time in the future, got 2020-01-01"),
        ("2020-01-01T00:00:00+02:00", "expected a time in the future"),
        ("tomorrow", "expected a date or a time, such as 2030-01-31 or 2030-01-31T12:00:00, got"),
    ],
)
def test_no_key_is_drawn_that_expires_at_no_future_time(expires: str, words: str) -> None:
    refused = CliRunner().invoke(app, ["key", "new", "--tenant", "one", "--expires", expires])
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert words in refused.stderr


def test_a_key_may_expire_in_the_time_of_another_zone(tmp_path: Path) -> None:
    flags = ["--tenant", "one", "--expires", "2099-01-01T02:00:00+02:00"]
    (tmp_path / "keys.toml").write_text(CliRunner().invoke(app, ["key", "new", *flags]).stdout)
    [key] = read_keys(tmp_path / "keys.toml").values()
    assert key.expires == 4070908800.0  # 2099-01-01T00:00:00Z
