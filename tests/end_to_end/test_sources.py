"""A model with cross attention: its layers attend to an encoder's output, the source of a sequence.

The workers are simulated: real processes that refuse every plan that contradicts the contract, and
whose tokens depend on the media.
"""

import re
from pathlib import Path

import pytest

from pagewire.v1.context_pb2 import CONTEXT_KIND_MEDIA, ContextPart
from tests.support.attached_frontend import AttachedFrontend
from tests.support.cluster import Cluster

PROMPT = [*range(1, 40)]
NUM_TOKENS = 150
SOURCES = [(), (5,), (64,), (300,), (5,), (64, 7)]
"""Tokens of the media of a request."""


def media(number: int, lengths: tuple[int, ...]) -> list[ContextPart]:
    digest = bytes([number]) * 32
    return [
        ContextPart(kind=CONTEXT_KIND_MEDIA, digest=digest, length=length) for length in lengths
    ]


@pytest.mark.parametrize("is_drained", [False, True])
async def test_requests_with_media_of_any_size_outlive_the_worker_that_held_their_sources(
    tmp_path: Path, is_drained: bool
) -> None:
    """Sources move with the rest of their KV when the worker is drained."""
    groups = ("--simulate-cache-groups", "growing:16,fixed:32")
    flags = ["--simulate", *groups, "--simulate-gpu-blocks", "60", "--simulate-step-us", "2000"]
    core_flags = ["--move-kv", "always"]
    with Cluster(tmp_path, worker_flags=flags, core_flags=core_flags) as cluster:
        cluster.start(num_workers=2)
        cluster.wait_num_ready(2)
        async with AttachedFrontend(cluster.core_address) as frontend:
            assert frontend.models
            handles = range(1, 1 + len(SOURCES))
            options = {"model": frontend.models[0], "max_tokens": NUM_TOKENS}
            for handle, lengths in enumerate(SOURCES, 1):
                context = media(handle, lengths)
                await frontend.submit(handle, PROMPT, context=context, **options)
                await frontend.wait_finished(handle)
            undisturbed = [frontend.tokens[handle] for handle in handles]
            assert len({tuple(tokens) for tokens in undisturbed}) == len(SOURCES)

            for handle, lengths in enumerate(SOURCES, 1):
                context = media(handle, lengths)
                await frontend.submit(100 + handle, PROMPT, context=context, **options)
            for handle in handles:
                await frontend.wait_tokens(100 + handle, 5)
            before = await frontend.status()
            if is_drained:
                cluster.workers[0].process.terminate()
            else:
                cluster.workers[0].kill()
            await frontend.wait_finished(*(100 + handle for handle in handles))
            after = await frontend.status()
            if is_drained:
                num_computed = after.num_prefill_tokens - before.num_prefill_tokens
                assert num_computed <= len(SOURCES), "no more than the last token of a request"
                assert after.num_fetched_blocks > before.num_fetched_blocks
                assert after.num_failed_fetches == 0
            assert [frontend.tokens[100 + handle] for handle in handles] == undisturbed
            assert any(frontend.finished[100 + handle].cached_tokens for handle in handles)

            too_large = media(0, (60 * 32,))
            await frontend.submit(200, PROMPT, context=too_large, **options)
            failed = await frontend.wait_failed(200)
            assert failed.reason == "PROMPT_LARGER_THAN_CACHE"
            assert "beside the 1920 tokens of the request's media" in failed.message
        assert cluster.core is not None
        if not is_drained:
            assert re.search(r"group gone group_id=\S+ num_requests=[1-9]", cluster.core.log)
        assert "INVALID_ARGUMENT" not in cluster.core.log
