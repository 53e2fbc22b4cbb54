"""What `pagewire top` shows: lines that fit a terminal of 80 by 24, and use a larger one."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pagewire.v1.status_pb2 import (
    EngineStatus,
    RequestState,
    RequestStatus,
    WorkerGroupStatus,
    WorkerState,
)
from pagewire_client.cli import top_blocks
from pagewire_client.cli.top_rates import Rates

_NUM_HEADER_LINES = 4
_MIN_REQUEST_LINES = 6
_BAR_CHARACTERS = 16
_STATE_STYLES = {"ready": "green", "draining": "yellow", "starting": "yellow"}
_REQUEST_STYLES = {"failed": "red", "recovering": "red", "preempted": "yellow", "swapped": "yellow"}


class Screen:
    """Lays a status out on so many columns and lines."""

    def __init__(self, width: int, height: int, *, in_colour: bool) -> None:
        self._width = width
        self._height = height
        self._in_colour = in_colour

    def render(self, status: EngineStatus, rates: Rates) -> RenderableType:
        """The whole picture."""
        groups = list(self._groups(status, rates))
        num_left = self._height - _NUM_HEADER_LINES - len(groups)
        lines = [*_header(status, rates), Text(), *groups]
        for line in lines:
            line.truncate(self._width, overflow="ellipsis")
        return Group(*lines, self._requests(status, num_left))

    def _groups(self, status: EngineStatus, rates: Rates) -> Iterable[Text]:
        for loss in status.worker_losses:
            if all(loss.group_id != group.group_id for group in status.groups):
                yield Text.assemble(
                    (loss.group_id, "bold"), " ", ("lost", "red"), f" {_duration(loss.age_s)} ago"
                )
        if not status.groups:
            yield Text("no worker is registered", style="yellow")
        map_lines = self._map_lines(len(status.groups))
        for group in status.groups:
            yield _group_line(group, rates)
            yield from self._map(group, map_lines)
        if status.groups and not self._in_colour:
            yield Text(top_blocks.LEGEND)
        yield Text()

    def _map_lines(self, num_groups: int) -> int:
        """Lines of each group's map."""
        room = self._height - _NUM_HEADER_LINES - _MIN_REQUEST_LINES - 2
        return min(12, room // max(1, num_groups) - 1)

    def _map(self, group: WorkerGroupStatus, num_lines: int) -> list[Text]:
        draw = top_blocks.draw
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
        for name in ("prompt", "output", "blocks", "age"):
            table.add_column(name, justify="right", no_wrap=True, min_width=6)
        shown = [*status.requests, *reversed(status.ended_requests)][: max(0, num_lines - 1)]
        for request in shown:
            table.add_row(*_request_row(request, in_colour=self._in_colour))
        return table


def _header(status: EngineStatus, rates: Rates) -> list[Text]:
    output = rates.per_second(lambda s: s.num_generated_tokens)
    prompt = rates.per_second(lambda s: s.num_prefill_tokens)
    models = ", ".join(status.models) or "no model"
    title = f" {status.version}  {models}  up {_duration(status.uptime_s)}"
    return [
        Text.assemble(("Pagewire", "bold"), (title, "dim")),
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
            ("lost", str(status.num_worker_losses)),
        ),
    ]


def _facts(*facts: tuple[str, str]) -> Text:
    parts = [Text.assemble((f"{name} " if name else "", "dim"), value) for name, value in facts]
    return Text("  ").join(parts)


def _latencies(rates: Rates, field: str) -> str:
    half, most = [rates.percentile(lambda s: getattr(s, field), share) for share in (0.5, 0.99)]
    return "-" if half is None or most is None else f"{_duration(half)}, p99 {_duration(most)}"


def _group_line(group: WorkerGroupStatus, rates: Rates) -> Text:
    state = WorkerState.Name(group.state).removeprefix("WORKER_STATE_").lower()
    used = group.num_gpu_blocks - group.num_free_gpu_blocks
    filled = round(_BAR_CHARACTERS * used / group.num_gpu_blocks) if group.num_gpu_blocks else 0
    steps = rates.steps_per_second(group.group_id)
    return Text.assemble(
        (group.group_id, "bold"),
        " ",
        (state, _STATE_STYLES.get(state, "red")),
        "  [",
        ("=" * filled, "green" if filled < _BAR_CHARACTERS - 1 else "yellow"),
        " " * (_BAR_CHARACTERS - filled),
        f"] {used} of {group.num_gpu_blocks} blocks",
        (f"  {group.num_running_sequences} sequences  {_number(steps)} steps/s", "dim"),
    )


def _request_row(request: RequestStatus, *, in_colour: bool) -> list[Text]:
    state = RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower()
    colour = top_blocks.colour_of(request.number)
    name = Text(request.request_id, style="dim" if request.ended_age_s else "")
    if in_colour and not request.ended_age_s:
        name = Text.assemble(("■ ", Style(color=colour)), name)
    tables = (*request.block_tables, *request.host_block_tables)
    num_blocks = sum(len(table) // 4 for table in tables)
    return [
        name,
        Text(state, style=_REQUEST_STYLES.get(state, "")),
        Text(request.group_id),
        Text(str(request.num_prompt_tokens)),
        Text(str(request.num_output_tokens)),
        Text(str(num_blocks) if num_blocks else ""),
        Text(_duration(request.age_s)),
    ]


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
