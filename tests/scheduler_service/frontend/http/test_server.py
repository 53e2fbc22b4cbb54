"""The HTTP server's life inside a frontend."""

import asyncio
import socket

import httpx
import pytest

from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.http.middleware import HttpServices
from scheduler_service.frontend.http.server import HttpServer, bind
from scheduler_service.frontend.server import make_frontend
from service_common.errors import CannotListen
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import eventually
from tests.support.http_frontends import HttpServed, http_client, http_frontend, http_served


async def test_health_is_503_until_a_model_can_be_served() -> None:
    async with http_served(FakeCore(models=[])) as served:
        refused = await served.client.get("/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "no_model_served"
        await (await served.core.attachment()).announce_models([model_info()])
        await eventually(lambda: served.frontend.models.is_serving)
        assert (await served.client.get("/health")).status_code == 200


async def test_callers_wait_from_the_bind_until_the_libraries_are_there() -> None:
    async with FakeCore() as core:
        frontend = make_frontend(
            FrontendConfig(core=core.address, listen="127.0.0.1:0", http="127.0.0.1:0")
        )
        assert frontend.http is not None
        frontend.http.bind()
        async with http_client(frontend) as client:
            early = asyncio.create_task(client.get("/health"))
            frontend.http.bind = lambda: None  # type: ignore[method-assign]
            await frontend.start()
            assert (await early).status_code in (200, 503)
            await frontend.stop()


async def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = FrontendConfig(core="127.0.0.1:1", listen="127.0.0.1:0", http=address)
        frontend = make_frontend(config)
        with pytest.raises(
            CannotListen, match=f"{address} for HTTP: address already in use; --http"
        ):
            await frontend.start()
        await frontend.stop()


async def test_frontends_share_a_port_only_when_told() -> None:
    (first,) = bind("127.0.0.1:0", share_port=True)
    address = f"127.0.0.1:{first.getsockname()[1]}"
    with first:
        (second,) = bind(address, share_port=True)
        second.close()
        with pytest.raises(CannotListen):
            bind(address, share_port=False)


async def test_localhost_listens_on_the_same_port_of_every_family() -> None:
    bound = bind("localhost:0", share_port=False)
    assert len({listening.getsockname()[1] for listening in bound}) == 1
    for listening in bound:
        listening.close()


@pytest.mark.parametrize("share_port", [False, True])
def test_every_address_of_ipv6_includes_those_of_ipv4(share_port: bool) -> None:
    (listening,) = bind("[::]:0", share_port=share_port)
    with listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.getsockname()[1])).close()


@pytest.mark.parametrize("share_port", [False, True])
def test_answers_do_not_wait_for_acknowledgements(share_port: bool) -> None:
    (listening,) = bind("127.0.0.1:0", share_port=share_port)
    with listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_body_that_was_not_sent_as_json_is_told_so() -> None:
    async with http_served() as served:
        answer = await served.client.post("/v1/completions", content=b'{"prompt": "a"}')
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_body"
    assert "content-type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
async def test_monitors_may_use_head(path: str) -> None:
    async with http_served() as served:
        answer = await served.client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("headers", [{"x-request-id": "mine-1"}, {}])
@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", b'{"prompt": "hello", "temperature": -1}', 400),
        ("/v1/chat/completions", b"{", 400),
        ("/v1/completions", b'{"prompt": "hello", "model": "other"}', 404),
        ("/v1/nothing", b"{}", 404),
        ("/v1/completions", bytes(17 << 20), 413),
    ],
)
async def test_error_answers_have_a_request_id(
    headers: dict[str, str], path: str, body: bytes, code: int
) -> None:
    async with http_served() as served:
        refused = await served.client.post(
            path, content=body, headers={"content-type": "application/json", **headers}
        )
    assert refused.status_code == code
    answered = refused.headers["x-request-id"]
    assert answered == headers.get("x-request-id", answered) != ""


async def test_a_caller_without_a_key_gets_a_request_id_too() -> None:
    async with http_served(api_key=["pw-" + "k" * 40]) as served:
        refused = await served.client.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine-1")


async def test_an_idle_connection_does_not_hold_up_the_end() -> None:
    async with FakeCore() as core:
        async with http_frontend(core.address) as frontend, http_client(frontend) as client:
            await client.get("/health")
            await asyncio.wait_for(frontend.stop(), 60)
        with pytest.raises(httpx.ConnectError):
            async with http_client(frontend) as late:
                await late.get("/health")


@pytest.mark.parametrize("address", ["8000", "unix:/tmp/http.sock", "host:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="http"):
        FrontendConfig(http=address)


class HttpThatCannotStart(HttpServer):
    async def start(self, services: HttpServices) -> None:
        raise RuntimeError("a library is missing")


async def test_a_frontend_whose_http_cannot_start_says_why_instead_of_staying_unready() -> None:
    async with FakeCore() as core:
        frontend = make_frontend(FrontendConfig(core=core.address, listen="127.0.0.1:0"))
        frontend.http = HttpThatCannotStart("127.0.0.1:0")
        await frontend.start()
        with pytest.raises(RuntimeError, match="a library is missing"):
            await frontend.failed()
        await frontend.stop()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:1", 200),
        ("127.0.0.1:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_a_loopback_address_without_keys_answers_to_its_own_names(
    served: HttpServed, host: str, status: int
) -> None:
    answer = await served.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert "--http-allowed-hosts" in answer.json()["error"]["message"]


async def test_the_names_that_are_allowed_can_be_chosen() -> None:
    async with http_served(http_allowed_hosts=["LLM.example"]) as served:
        for host, status in (("llm.example:80", 200), ("localhost", 403)):
            answer = await served.client.get("/v1/models", headers={"host": host})
            assert answer.status_code == status


async def test_with_keys_any_name_is_answered() -> None:
    async with http_served(api_key=["a-key-of-some-length"]) as served:
        headers = {"host": "evil.example", "authorization": "Bearer a-key-of-some-length"}
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"]])
async def test_a_request_has_one_host(served: HttpServed, hosts: list[str]) -> None:
    assert served.frontend.http is not None
    name, _, port = served.frontend.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    lines = ["GET /v1/models HTTP/1.1", *(f"Host: {host}" for host in hosts), "", ""]
    writer.write("\r\n".join(lines).encode())
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_two_credentials_are_refused() -> None:
    key = "a-key-of-some-length"
    async with http_served(api_key=[key]) as served:
        headers = [("authorization", f"Bearer {key}"), ("authorization", "Bearer other")]
        answer = await served.client.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert "authorization: expected once" in answer.json()["error"]["message"]
