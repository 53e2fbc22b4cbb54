"""`/tokenize`, `/detokenize`, `/version`."""

import asyncio

import pytest

from scheduler_service.frontend.http.errors import BODY_FORMS
from scheduler_service.frontend.http.tokenize import TokenizeChat, TokenizeText
from service_common.version import VERSION
from tests.support.fake_core import FakeCore, model_info
from tests.support.http_frontends import http_served
from tests.support.tokenizers import BOS, byte_level, tokens

TEXT = "hello naïve 世界"


async def test_a_text_comes_back() -> None:
    async with http_served() as served:
        wish = {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True}
        told = (await served.client.post("/tokenize", json=wish)).json()
        assert told["tokens"] == tokens(TEXT)
        assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
        assert told["max_model_len"] == 256
        back = await served.client.post("/detokenize", json={"tokens": told["tokens"]})
        assert back.json() == {"prompt": TEXT}


@pytest.mark.parametrize(("max_cached_tokens", "expected"), [(0, 256), (97, 97), (4096, 256)])
async def test_the_length_of_a_model_is_what_a_cache_holds_wherever_it_is_reported(
    max_cached_tokens: int, expected: int
) -> None:
    core = FakeCore(models=[model_info(max_cached_tokens=max_cached_tokens)])
    async with http_served(core) as served:
        [model] = (await served.client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == expected
        tokenized = await served.client.post("/tokenize", json={"prompt": TEXT})
        assert tokenized.json()["max_model_len"] == expected


async def test_as_much_of_a_prompt_is_kept_as_the_cache_holds() -> None:
    core = FakeCore(models=[model_info(max_cached_tokens=97)])
    async with http_served(core) as served:
        body = {"prompt": "a " * 300, "truncate_prompt_tokens": -1, "max_tokens": 7}
        answer = asyncio.create_task(served.client.post("/v1/completions", json=body))
        request = await served.core.next_request()
        assert len(request.prompt) == 90
        await request.complete(tokens("b"))
        assert (await answer).status_code == 200


async def test_special_tokens_come_back_unless_told_otherwise() -> None:
    async with http_served() as served:
        told = (await served.client.post("/tokenize", json={"prompt": TEXT})).json()
        back = await served.client.post("/detokenize", json={"tokens": told["tokens"]})
        assert back.json() == {"prompt": f"{BOS}{TEXT}"}
        wish = {"tokens": told["tokens"], "skip_special_tokens": True}
        assert (await served.client.post("/detokenize", json=wish)).json() == {"prompt": TEXT}


async def test_a_chat_is_tokenized_as_it_would_be_answered() -> None:
    async with http_served() as served:
        wish = {"messages": [{"role": "user", "content": "hello"}]}
        told = (await served.client.post("/tokenize", json=wish)).json()
        text = byte_level().decode(told["tokens"], skip_special_tokens=True)
        assert text == "[user]hello[assistant]"


def test_the_forms_of_a_body_are_those_that_errors_know() -> None:
    assert (TokenizeText.__name__, TokenizeChat.__name__) == BODY_FORMS


async def test_the_version_is_told() -> None:
    async with http_served() as served:
        assert (await served.client.get("/version")).json() == {"version": VERSION}


async def test_the_tokenizers_configuration_is_told() -> None:
    async with http_served() as served:
        told = await served.client.get("/tokenizer_info")
        assert told.status_code == 200
        assert "[assistant]" in told.json()["chat_template"]
        refused = await served.client.get("/tokenizer_info", params={"model": "nosuch"})
        assert refused.json()["error"]["code"] == "model_not_found"
