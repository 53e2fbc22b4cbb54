"""Scenarios: commands to a core, with the plans and the outputs that they print.

Each file in tests/scheduler_service/scenarios/ holds comments (#), commands, and indented below
each command what it prints. To write the printed lines again, and read the difference:

    python -m tests.scheduler_service.core.test_scenarios --rewrite

Commands (sizes in tokens; `name` is a request's):

    config KEY=VALUE ...        a core with these fields of SchedulerConfig, in place of the former
    tenant NAME KEY=VALUE ...   fields of TenantConfig, by NAME or for the `default`; after config
    group ID KEY=VALUE ...      a worker group joins; fields of WorkerGroupCapacity, for short
                                `blocks` on the device, `host` blocks, and the `kinds` of work
    submit NAME prompt=N max_tokens=N [n=N] [stop_at=N] [timeout=S] [frontend=ID] [model=NAME]
           [like=NAME:N] [logprobs=true] [width=N] [stops=N] [tenant=NAME] [priority=N]
           [min_tokens=N] [fails_at=N] [accepted=true]
                                stop_at: the token at that output position is a stop token
                                like: it begins with N tokens of another's prompt and first choice
                                logprobs: of the prompt
                                width: beam search with N beams for the n best
                                stops: the first N token ids are stop tokens
                                fails_at: the output position at which a row fails
                                accepted: by a former core
    pool NAME TYPE prompt=N [like=NAME:N] [dimensions=N]
                                a request for a vector: cls, last or mean
    again NAME FRONTEND N       its client tries again with N tokens of each choice
    plan GROUP                  schedule a step; the worker executes it at once
    result GROUP                the oldest result comes in
    steps N GROUP ...           N times, of each group, a plan and a result
    run                         plans and results, until nothing is left to do
    cancel NAME | abort NAME | stop NAME CHOICE NUM_TOKENS
    lose GROUP | drain GROUP | wait SECONDS | status
    timeline NAME               the request as status pages show it, live or ended
    die GROUP N [N]             N times, the worker dies with N steps in flight, and another joins
    restart                     a new core: workers join, frontends submit again what is open

Sequences are numbered in order of submission. In `rows`, 1:6* is sequence 1 computing 6 tokens and
sampling the next.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.core import (
    BeamParams,
    EarlyStopping,
    EngineOutputs,
    PolicyName,
    SchedulerConfig,
    TenantConfig,
    WorkerGroupSnapshot,
)
from scheduler_service.core.config import PoolingType, PreemptionMode, WorkKind
from scheduler_service.errors import PagewireError
from scheduler_service.replay.report import show_plan
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.inspections import check_inspection
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import Sampling, undisturbed
from tests.support.transcripts import commands, transcript

SHORT_NAMES = {"blocks": "num_gpu_blocks", "host": "num_cpu_blocks", "kinds": "work_kinds"}
SCENARIOS = Path(__file__).parents[1] / "scenarios"


def parse_options(words: list[str]) -> dict[str, str]:
    """KEY=VALUE words."""
    return dict(word.split("=", 1) for word in words)


def convert(key: str, value: str) -> Any:
    """A configuration value."""
    if key == "policy":
        return PolicyName(value)
    if key == "kinds":
        return frozenset(WorkKind[kind.upper()] for kind in value.split(","))
    if value in ("true", "false"):
        return value == "true"
    if value in tuple(PreemptionMode):
        return PreemptionMode(value)
    return float(value) if "." in value else int(value)


def beam_params(width: int) -> BeamParams:
    """Of a search that ends as soon as it can."""
    return BeamParams(width=width, length_penalty=1.0, early_stopping=EarlyStopping.WHEN_FULL)


class Scenario:
    """Runs one file's commands."""

    driver: CoreDriver

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}

    def execute(self, line: str) -> list[str]:
        """What a command prints."""
        command, *words = line.split()
        try:
            printed: list[str] = getattr(self, f"do_{command}")(*words) or []
        except PagewireError as error:
            printed = [f"refused: {error.reason}: {error.message}"]
            if error.retry_delay_s is not None:
                printed.append(f"retry after {error.retry_delay_s * 1000:.0f} ms")
        if command != "config":
            self.driver.core.check()
            printed += self.read_news()
        return printed

    def do_config(self, *words: str) -> None:
        self.config = SchedulerConfig(**self.convert_all(words))
        self.driver = CoreDriver(self.config)
        self.records.clear()

    def do_tenant(self, name: str, *words: str) -> None:
        tenant = TenantConfig(**self.convert_all(words))
        if name == "default":
            self.config = replace(self.config, default_tenant=tenant)
        else:
            self.config = replace(self.config, tenants={**self.config.tenants, name: tenant})
        self.driver = CoreDriver(self.config)

    def convert_all(self, words: Sequence[str]) -> dict[str, Any]:
        return {key: convert(key, value) for key, value in parse_options(list(words)).items()}

    def do_group(self, group_id: str, *words: str) -> list[str] | None:
        options = parse_options(list(words))
        changes: dict[str, Any] = {
            SHORT_NAMES.get(key, key): value if key == "model" else convert(key, value)
            for key, value in options.items()
        }
        try:
            self.driver.add_worker_group(make_capacity(group_id, **changes))
        except ValueError as error:
            return [f"refused: {error}"]
        return None

    def do_submit(self, name: str, *words: str) -> None:
        options = parse_options(list(words))
        sampling = Sampling(
            seed=len(self.records),
            prompt_logprobs="logprobs" in options,
            fails_at=int(options["fails_at"]) if "fails_at" in options else None,
        )
        prompt = self.make_prompt(int(options["prompt"]), options.get("like"))
        stop_token_ids: frozenset[int] = frozenset()
        if "stop_at" in options:
            tokens = undisturbed(prompt, 0, sampling, frozenset(), int(options["stop_at"]) + 1)
            assert tokens[-1] not in tokens[:-1], "choose another place to stop"
            stop_token_ids = frozenset(tokens[-1:])
        if "stops" in options:
            stop_token_ids = frozenset(range(int(options["stops"])))
        self.records[name] = self.driver.submit(
            prompt=prompt,
            max_tokens=int(options["max_tokens"]),
            n=int(options.get("n", 1)),
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            frontend_id=options.get("frontend", "f0"),
            request_id=name,
            model=options.get("model", "m"),
            beam_search=beam_params(int(options["width"])) if "width" in options else None,
            timeout=float(options["timeout"]) if "timeout" in options else None,
            tenant=options.get("tenant", ""),
            priority=int(options.get("priority", 0)),
            min_tokens=int(options.get("min_tokens", 0)),
            was_accepted="accepted" in options,
        )

    def do_pool(self, name: str, type: str, *words: str) -> None:
        options = parse_options(list(words))
        prompt = self.make_prompt(int(options["prompt"]), options.get("like"))
        self.records[name] = self.driver.submit_pooled(
            prompt,
            PoolingType[type.upper()],
            dimensions=int(options.get("dimensions", 0)),
            request_id=name,
        )

    def do_again(self, name: str, frontend_id: str, num_received: str) -> list[str]:
        former = self.records[name]
        self.records[name] = self.driver.try_again(former, frontend_id, int(num_received))
        return [] if former.error is None else [f"the former try fails: {former.error.reason}"]

    def make_prompt(self, num_tokens: int, like: str | None) -> list[int]:
        """A prompt that differs from all others, after the prefix that `like` makes it share."""
        number = len(self.records)
        prompt = [1 + (number + i) % 31 for i in range(num_tokens)]
        if like is not None:
            name, num_shared = like.split(":")
            record = self.records[name]
            tokens = [*record.request.prompt_token_ids, *record.choices[0].tokens]
            assert int(num_shared) <= min(len(tokens), num_tokens)
            prompt[: int(num_shared)] = tokens[: int(num_shared)]
        return prompt

    def do_plan(self, group_id: str) -> list[str]:
        return show_plan(self.driver.schedule(group_id))

    def do_result(self, group_id: str) -> list[str]:
        return [] if self.driver.deliver(group_id) else ["none is on its way"]

    def do_steps(self, number: str, *group_ids: str) -> list[str]:
        printed: list[str] = []
        for _ in range(int(number)):
            for group_id in group_ids:
                self.driver.schedule(group_id)
                self.driver.deliver(group_id)
                printed += self.read_news()
        return printed

    def do_run(self) -> list[str]:
        first = self.driver.num_steps
        printed: list[str] = []
        for _ in range(1000):
            planned = [self.driver.schedule(group_id) for group_id in self.driver.links]
            delivered = [self.driver.deliver(group_id) for group_id in self.driver.links]
            printed += self.read_news()
            if not any(planned) and not any(delivered):
                return [f"{self.driver.num_steps - first} steps", *printed]
        raise AssertionError("does not come to rest")

    def do_cancel(self, name: str) -> None:
        self.driver.cancel(self.records[name])

    def do_abort(self, name: str) -> None:
        self.driver.core.abort("", name, self.driver.now)

    def do_stop(self, name: str, choice: str, num_tokens: str) -> None:
        self.driver.stop_choice(self.records[name], int(choice), int(num_tokens))

    def do_lose(self, group_id: str) -> None:
        self.driver.lose_worker_group(group_id)

    def do_restart(self) -> None:
        self.driver.lose_core()

    def do_die(self, group_id: str, times: str, num_steps: str = "1") -> list[str]:
        printed: list[str] = []
        for _ in range(int(times)):
            for _ in range(int(num_steps)):
                self.driver.schedule(group_id)
            capacity = self.driver.links[group_id].capacity
            self.driver.lose_worker_group(group_id)
            printed += self.read_news()
            self.driver.add_worker_group(capacity)
        return printed

    def do_drain(self, group_id: str) -> None:
        self.driver.drain_worker_group(group_id)

    def do_wait(self, seconds: str) -> None:
        self.driver.expire(float(seconds))

    def do_status(self) -> list[str]:
        status = self.driver.core.snapshot()
        swapped = f"swapped={status.num_swapped} " if status.num_swapped else ""
        lines = [
            f"waiting={status.num_waiting} running={status.num_running} {swapped}"
            f"finished={status.num_finished} preemptions={status.num_preemptions} "
            f"generated={status.num_generated_tokens} prefilled={status.num_prefill_tokens}"
        ]
        for group in status.worker_groups:
            name = group.worker_group_id
            drained = self.driver.core.is_drained(name)
            lines.append(
                f"{name}: {group.num_free_gpu_blocks} of {group.num_gpu_blocks} blocks "
                f"free, {group.num_running_sequences} sequences"
                + self._host_status(group)
                + (" drained" if drained else " draining" if group.draining else "")
            )
        return lines

    def _host_status(self, group: WorkerGroupSnapshot) -> str:
        if group.num_cpu_blocks == 0:
            return ""
        return f", {group.num_free_cpu_blocks} of {group.num_cpu_blocks} host blocks free"

    def do_timeline(self, name: str) -> list[str]:
        seen = check_inspection(self.driver.core)
        requests = {shown.request_id: shown for shown in (*seen.ended_requests, *seen.requests)}
        request = requests[name]
        facts = {
            "groups": request.placements,
            "tenant": request.tenant,
            "priority": request.priority,
            "tokens": f"{request.num_prompt_tokens}+{request.num_output_tokens}",
            "cached": request.num_cached_tokens,
            "computed": request.num_computed_tokens,
            "blocks": request.block_tables,
            "host": request.host_block_tables,
            "error": request.error_reason,
        }
        events = [f"{event.name} {value}" for event, _, value in request.events]
        shown = " ".join(f"{fact}={value}" for fact, value in facts.items() if value)
        return [f"{request.state.name} {shown}", ", ".join(events)]

    def read_news(self) -> list[str]:
        """What the frontends hear, checked by the driver, in words."""
        lines: list[str] = []
        outboxes = self.driver.core.pop_outboxes()
        for frontend_id, outbox in outboxes.items():
            self.driver.read(frontend_id, outbox)
            lines += self._show(outbox)
        return lines

    def _show(self, outbox: EngineOutputs) -> list[str]:
        def name(handle: int) -> str:
            for name, record in self.records.items():
                choice = handle - record.request.handle
                num_choices = len(record.choices)
                if 0 <= choice < num_choices:
                    return name if num_choices == 1 else f"{name}[{choice}]"
            return f"#{handle}"

        tokens: dict[str, int] = {}
        for handle in outbox.token_handles:
            tokens[name(handle)] = tokens.get(name(handle), 0) + 1
        lines = [f"{choice} gets {count}" for choice, count in tokens.items()]
        lines += [f"{name(handle)} gets a vector" for handle, *_ in outbox.vectors]
        lines += [f"{name(end.handle)} ends by {end.reason}" for end in outbox.choices_finished]
        names = {record.request.handle: name for name, record in self.records.items()}
        for end in outbox.requests_finished:
            times = end.timings
            waits = {"preempted": times.preempted_us, "recovery": times.recovery_us}
            parts = [f", {what} {us} us" for what, us in waits.items() if us]
            if end.cached_tokens:
                parts.append(f", {end.cached_tokens} cached tokens")
            lines.append(f"{names[end.handle]} is done{''.join(parts)}")
        for handle in outbox.worker_losses:
            is_alone = handle in outbox.lone_worker_losses
            lines.append(f"{names[handle]} loses its worker{' alone' if is_alone else ''}")
        for handle, error in outbox.requests_failed:
            assert isinstance(error, PagewireError)
            lines.append(f"{names[handle]} fails: {error.reason}: {error.message}")
        return lines


def replay(text: str) -> str:
    """The file as its commands print it now."""
    return transcript(text, map(Scenario().execute, commands(text)))


FILES = sorted(SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario_prints_what_its_file_says(file: Path) -> None:
    text = file.read_text()
    assert replay(text) == text


if __name__ == "__main__":
    assert sys.argv[1:] == ["--rewrite"], __doc__
    for scenario_file in FILES:
        scenario_file.write_text(replay(scenario_file.read_text()))
