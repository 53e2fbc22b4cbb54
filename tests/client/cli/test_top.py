"""`pagewire top`: what a status looks like in a terminal."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pagewire.status_rates import RecentStatuses
from pagewire.v1 import status_pb2 as pb
from pagewire_cli.app import app
from pagewire_cli.top_screen import Screen, draw_blocks
from tests.support.fake_frontend import MODEL, FakeFrontend


def column(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def block_map(owners: list[int], references: list[int]) -> pb.BlockMap:
    return pb.BlockMap(owners=column(owners), num_references=bytes(references))


def make_status(
    uptime_s: float = 10.0,
    tokens: int = 0,
    num_requests: int = 3,
    cache_groups: Sequence[pb.CacheGroupStatus] = (),
    kv_moves: str = "",
    adapters: str = "",
) -> pb.EngineStatus:
    status = pb.EngineStatus(
        uptime_s=uptime_s, version="1.2.3", models=["m"], num_running=3, num_generated_tokens=tokens
    )
    status.inter_token_latency.CopyFrom(
        pb.LatencyHistogram(first_bound_s=0.001, growth=2.0, counts=[0, tokens])
    )
    group = status.groups.add(
        group_id="g0",
        state=pb.WORKER_STATE_READY,
        num_gpu_blocks=8,
        num_free_gpu_blocks=4,
        num_cpu_blocks=2,
        num_steps=tokens,
        cache_groups=cache_groups,
        kv_moves=kv_moves,
        adapters=adapters,
    )
    group.gpu_blocks.CopyFrom(block_map([0, 7, 7, 9, 9, -1, -1, 0], [0, 2, 1, 1, 1, 0, 0, 0]))
    group.cpu_blocks.CopyFrom(block_map([0, 11], [0, 1]))
    status.worker_losses.add(group_id="g1", lost_at_s=uptime_s - 5)
    for number in range(num_requests):
        status.requests.add(
            request_id=f"request-{number}",
            number=number + 1,
            state=pb.REQUEST_STATE_DECODING,
            group_id="g0",
            num_prompt_tokens=12,
            block_tables=[column([1, 2, 3]), column([1, 2, 4])],
            host_block_tables=[column([1])],
            accepted_at_s=uptime_s - 2.5,
        )
    return status


def rendered(
    width: int, height: int, *, in_colour: bool = False, **changes: Any
) -> tuple[list[str], str]:
    """The lines as text, and the raw output."""
    rates = RecentStatuses()
    rates.add(make_status(9.0))
    status = make_status(10.0, tokens=500, **changes)
    rates.add(status)
    output = io.StringIO()
    console = Console(
        file=output,
        width=width,
        force_terminal=in_colour,
        color_system="truecolor" if in_colour else None,
    )
    console.print(Screen(width, height, in_colour=in_colour).render(status, rates))
    raw = output.getvalue()
    return raw.splitlines(), raw


def test_a_picture_has_rates_latencies_memory_and_requests() -> None:
    lines, _ = rendered(100, 40)
    text = "\n".join(lines)
    for words in (
        "Pagewire 1.2.3  totals since the core's start 10.0 s ago  m",
        "tokens/s 500 out",
        "itl 1.41 ms, p99 1.99 ms",
        "3 running",
        "g1 lost 5.0 s ago",
        "g0 ready  [========        ] 4 of 8 blocks",
        "500 steps/s",
        ".%###::.",
        "host .#",
    ):
        assert words in text
    [row] = [line for line in lines if line.startswith("request-1")]
    assert row.split() == ["request-1", "decoding", "g0", "12", "0", "5", "2.5", "s"]


@pytest.mark.parametrize("in_colour", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 16), (200, 60)])
def test_it_fits_the_terminal(width: int, height: int, in_colour: bool) -> None:
    lines, _ = rendered(width, height, in_colour=in_colour, num_requests=90)
    assert len(lines) <= height


def test_it_shows_the_adapters_of_a_group() -> None:
    assert "adapters  sql 0, support 3" in rendered(80, 24, adapters="sql 0, support 3")[1]
    assert "adapters" not in rendered(80, 24)[1]


def test_it_shows_why_kv_does_not_move() -> None:
    for moves in ("with all", "no other group"):
        assert "KV moves" not in rendered(80, 24, kv_moves=moves)[1]
    assert (
        "KV moves  none: --move-kv never" in rendered(80, 24, kv_moves="none: --move-kv never")[1]
    )


def test_it_shows_cache_groups_if_there_are_several() -> None:
    growing = pb.CacheGroupStatus(lifetime="growing", block_tokens=16, num_used_blocks=3)
    state = pb.CacheGroupStatus(lifetime="state", num_state_blocks=2, num_used_blocks=4)
    lines, text = rendered(80, 24, cache_groups=[growing])
    assert "growing" not in text
    lines, text = rendered(80, 24, num_requests=90, cache_groups=[growing, state])
    assert "  growing, 16 tokens a block  3 blocks in use, 0 cached, nothing looked up" in text
    assert "  state, 2 blocks each  2 in use, 0 saved, nothing looked up" in text
    assert len(lines) <= 24


def test_colours_are_the_requests_and_two_rows_are_one() -> None:
    [row] = draw_blocks(
        block_map([1, 1, 2, 0], [1, 1, 1, 0]),
        width=2,
        height=1,
        in_colour=True,
    )
    assert row.plain == "▀▀"
    first, second = (span.style for span in row.spans)
    assert first.color == second.color  # type: ignore[union-attr]
    assert first.bgcolor not in (first.color, second.bgcolor)  # type: ignore[union-attr]


def test_a_large_memory_is_drawn_in_cells_of_several_blocks() -> None:
    owners = [0] * 50 + [-1] * 25 + [3] * 25
    blocks = block_map(owners, [0] * 75 + [1] * 25)
    [row] = draw_blocks(blocks, width=20, height=1, in_colour=False)
    assert row.plain == ".........." + ":::::" + "#####"


def test_a_pipe_gets_one_picture_without_colours(frontend: FakeFrontend) -> None:
    result = CliRunner().invoke(
        app, ["top", "--interval", "0.1", "--address", frontend.address], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert MODEL in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stdout.count("Pagewire") == 1


def test_an_interval_is_a_number() -> None:
    result = CliRunner().invoke(app, ["top", "--interval", "nan"])
    assert result.exit_code == 2
    assert "--interval: expected 0.1 to 60, got nan" in result.stderr
