"""The screen of `pagewire top`: it fits a terminal of 80 by 24 and uses the space of a larger one.

`draw_blocks` draws a memory's blocks, half a cell per block in colour, a letter without. If there
are more blocks than cells, a cell represents several: it shows the first of them that is in use, or
else the first that is cached.
"""

import colorsys
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.color import Color
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pagewire.status_rates import RecentStatuses
from pagewire_client.deployment import (
    BlockMap,
    EngineStatus,
    RequestStatus,
    WorkerGroupStatus,
    describe_cache_group,
    describe_load,
    lost_workers,
    unpack,
    word,
)

_CACHED = -1
_GOLDEN_ANGLE = 0.381966
_CACHED_COLOUR = Color.from_rgb(92, 98, 108)
_EMPTY_COLOUR = Color.from_rgb(38, 42, 48)
_LETTERS = {"shared": "%", "used": "#", "cached": ":", "empty": "."}
BLOCK_LEGEND = "# in use  % shared  : free, cached  . empty"

Cell = tuple[int, bool]
"""A cell's owner, and whether it is shared."""


def draw_blocks(blocks: BlockMap, width: int, height: int, *, in_colour: bool) -> list[Text]:
    """The rows of a map: as few as possible, at most `height`."""
    per_character = 2 if in_colour else 1
    num_blocks = len(blocks.num_references)
    if not num_blocks or height < 1:
        return []
    room = width * height * per_character
    cells = _cells(blocks, -(-num_blocks // room))
    if not in_colour:
        return [_letters(cells[i : i + width]) for i in range(0, len(cells), width)]
    rows = [cells[i : i + width] for i in range(0, len(cells), width)]
    return [_halves(rows[i], rows[i + 1 : i + 2]) for i in range(0, len(rows), 2)]


@lru_cache(maxsize=4096)
def colour_of(number: int) -> Color:
    """A request's colour; consecutive numbers differ much in hue."""
    lightness = 0.55 if number % 2 else 0.66
    red, green, blue = colorsys.hls_to_rgb(number * _GOLDEN_ANGLE % 1, lightness, 0.55)
    return Color.from_rgb(red * 255, green * 255, blue * 255)


def _cells(blocks: BlockMap, blocks_per_cell: int) -> list[Cell]:
    owners = unpack(blocks.owners)
    shared = [references > 1 for references in blocks.num_references]
    if blocks_per_cell == 1:
        return list(zip(owners, shared, strict=True))
    return [
        _cell_summary(owners[i : i + blocks_per_cell], shared[i : i + blocks_per_cell])
        for i in range(0, len(owners), blocks_per_cell)
    ]


def _cell_summary(owners: Sequence[int], shared: Sequence[bool]) -> Cell:
    used = next((index for index, owner in enumerate(owners) if owner > 0), None)
    if used is not None:
        return owners[used], shared[used]
    return min(owners), False


def _letters(cells: Sequence[Cell]) -> Text:
    return Text("".join(_LETTERS[_cell_kind(cell)] for cell in cells))


def _cell_kind(cell: Cell) -> str:
    owner, is_shared = cell
    if owner > 0:
        return "shared" if is_shared else "used"
    return "cached" if owner == _CACHED else "empty"


def _halves(upper: Sequence[Cell], rest: Sequence[Sequence[Cell]]) -> Text:
    """Two rows of cells as one line: the upper row is the foreground, the lower the background."""
    lower = rest[0] if rest else ()
    text = Text()
    for index, cell in enumerate(upper):
        below = _cell_colour(lower[index]) if index < len(lower) else None
        text.append("▀", Style(color=_cell_colour(cell), bgcolor=below))
    return text


def _cell_colour(cell: Cell) -> Color:
    owner, is_shared = cell
    if owner <= 0:
        return _CACHED_COLOUR if owner == _CACHED else _EMPTY_COLOUR
    if not is_shared:
        return colour_of(owner)
    triplet = colour_of(owner).triplet
    assert triplet is not None
    return Color.from_rgb(
        *[(255 + part) // 2 for part in triplet]
    )  # lighter: shared by several requests


_NUM_HEADER_LINES = 4
_MIN_REQUEST_LINES = 6
_BAR_CHARACTERS = 16
_STATE_STYLES = {"ready": "green", "draining": "yellow", "starting": "yellow"}
_REQUEST_STYLES = {"failed": "red", "recovering": "red", "preempted": "yellow", "swapped": "yellow"}


class Screen:
    """Lays out a status on `width` columns and `height` lines."""

    def __init__(self, width: int, height: int, *, in_colour: bool) -> None:
        self._width = width
        self._height = height
        self._in_colour = in_colour

    def render(self, status: EngineStatus, rates: RecentStatuses) -> RenderableType:
        """The whole screen."""
        groups = list(self._groups(status, rates))
        num_left = self._height - _NUM_HEADER_LINES - len(groups)
        lines = [*_header(status, rates), Text(), *groups]
        for line in lines:
            line.truncate(self._width, overflow="ellipsis")
        return Group(*lines, self._requests(status, num_left))

    def _groups(self, status: EngineStatus, rates: RecentStatuses) -> Iterable[Text]:
        for loss in lost_workers(status):
            age = _duration(status.uptime_s - loss.lost_at_s)
            yield Text.assemble((loss.group_id, "bold"), " ", ("lost", "red"), f" {age} ago")
        for load in status.loading:
            yield Text.assemble((load.group_id, "bold"), " ", (describe_load(load), "yellow"))
        if not status.groups and not status.loading:
            yield Text("no worker is registered", style="yellow")
        caches = {group.group_id: list(_cache_lines(group)) for group in status.groups}
        map_lines = self._map_lines(len(status.groups), sum(map(len, caches.values())))
        for group in status.groups:
            yield _group_line(group, rates)
            yield from caches[group.group_id]
            yield from self._map(group, map_lines)
        if status.groups and not self._in_colour:
            yield Text(BLOCK_LEGEND)
        yield Text()

    def _map_lines(self, num_groups: int, num_others: int) -> int:
        """Number of lines of each group's map; `num_others`: lines of cache groups."""
        room = self._height - _NUM_HEADER_LINES - _MIN_REQUEST_LINES - 2 - num_others
        return min(12, room // max(1, num_groups) - 1)

    def _map(self, group: WorkerGroupStatus, num_lines: int) -> list[Text]:
        draw = draw_blocks
        num_host_lines = 1 if group.num_cpu_blocks and num_lines > 2 else 0
        rows = draw(
            group.gpu_blocks, self._width, num_lines - num_host_lines, in_colour=self._in_colour
        )
        label = "host "
        host_width = self._width - len(label)
        host = draw(group.cpu_blocks, host_width, num_host_lines, in_colour=self._in_colour)
        return rows + [Text.assemble((label, "dim"), row) for row in host]

    def _requests(self, status: EngineStatus, num_lines: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("request", no_wrap=True, overflow="ellipsis", ratio=1)
        for name in ("state", "worker"):
            table.add_column(name, no_wrap=True, min_width=10)
        for name in ("prompt", "output", "blocks", "duration"):
            table.add_column(name, justify="right", no_wrap=True, min_width=6)
        shown = [*status.requests, *reversed(status.ended_requests)][: max(0, num_lines - 1)]
        for request in shown:
            table.add_row(*_request_row(request, status.uptime_s, in_colour=self._in_colour))
        return table


def _header(status: EngineStatus, rates: RecentStatuses) -> list[Text]:
    output = rates.per_second(lambda s: s.num_generated_tokens)
    prompt = rates.per_second(lambda s: s.num_prefill_tokens)
    models = ", ".join(status.models) or "no model"
    title = f" {status.version}  totals since the core's start {_duration(status.uptime_s)} ago"
    return [
        Text.assemble(("Pagewire", "bold"), (title, "dim"), f"  {models}"),
        _facts(
            ("tokens/s", f"{_number(output)} out, {_number(prompt)} in"),
            ("ttft", _latencies(rates, "time_to_first_token")),
            ("itl", _latencies(rates, "inter_token_latency")),
        ),
        _facts(
            ("requests", f"{status.num_running} running"),
            ("", f"{status.num_waiting} waiting"),
            ("", f"{status.num_swapped} swapped"),
            ("", f"{status.num_finished} ended"),
            ("preempted", str(status.num_preemptions)),
            ("blocks moved", str(status.num_fetched_blocks)),
            ("lost", str(status.num_worker_losses)),
        ),
    ]


def _facts(*facts: tuple[str, str]) -> Text:
    parts = [Text.assemble((f"{name} " if name else "", "dim"), value) for name, value in facts]
    return Text("  ").join(parts)


def _latencies(rates: RecentStatuses, field: str) -> str:
    half, most = [rates.percentile(lambda s: getattr(s, field), share) for share in (0.5, 0.99)]
    return "-" if half is None or most is None else f"{_duration(half)}, p99 {_duration(most)}"


def _group_line(group: WorkerGroupStatus, rates: RecentStatuses) -> Text:
    used = group.num_gpu_blocks - group.num_free_gpu_blocks
    filled = round(_BAR_CHARACTERS * used / group.num_gpu_blocks) if group.num_gpu_blocks else 0
    steps, state = rates.steps_per_second(group.group_id), word(group, "state")
    return Text.assemble(
        (group.group_id, "bold"),
        " ",
        (state, _STATE_STYLES.get(state, "red")),
        "  [",
        ("=" * filled, "green" if filled < _BAR_CHARACTERS - 1 else "yellow"),
        " " * (_BAR_CHARACTERS - filled),
        f"] {used} of {group.num_gpu_blocks} blocks" if group.num_gpu_blocks else "] no cache",
        (f"  {group.num_running_sequences} sequences  {_number(steps)} steps/s", "dim"),
    )


def _cache_lines(group: WorkerGroupStatus) -> Iterable[Text]:
    """The group's cache groups, if there are several, and reasons why KV does not move."""
    for cache_group in group.cache_groups if len(group.cache_groups) > 1 else ():
        name, use = describe_cache_group(cache_group)
        yield Text.assemble((f"  {name}  ", "dim"), use)
    if group.kv_moves not in ("", "with all", "no other group"):
        yield Text.assemble(("  KV moves  ", "dim"), group.kv_moves)
    if group.adapters:
        yield Text.assemble(("  adapters  ", "dim"), group.adapters)


def _request_row(request: RequestStatus, uptime_s: float, *, in_colour: bool) -> list[Text]:
    is_over = request.HasField("ended_at_s")
    name = Text(request.request_id, style="dim" if is_over else "")
    if in_colour and not is_over:
        name = Text.assemble(("■ ", Style(color=colour_of(request.number))), name)
    num_blocks = _num_blocks(request.block_tables) + _num_blocks(request.host_block_tables)
    state = word(request, "state")
    until_s = request.ended_at_s if is_over else uptime_s
    return [
        name,
        Text(state, style=_REQUEST_STYLES.get(state, "")),
        Text(request.group_id),
        Text(str(request.num_prompt_tokens)),
        Text(str(request.num_output_tokens)),
        Text(str(num_blocks) if num_blocks else ""),
        Text(_duration(until_s - request.accepted_at_s)),
    ]


def _num_blocks(tables: Iterable[bytes]) -> int:
    """Number of blocks of one memory; the sequences of a request share some."""
    return len({block for table in tables for block in unpack(table)})


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
