"""Recordings in memory, of cores that symbolic workers drive."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

from scheduler_service.core import SchedulerConfig
from scheduler_service.errors import PromptTooLong, QueueFull
from scheduler_service.replay.exact_replay import ExactReplay, Summary
from scheduler_service.replay.recorder import RecordingCore
from scheduler_service.replay.recording import (
    DecodeSampling,
    Entry,
    Header,
    decode_entry,
    decode_header,
)
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.symbolic_worker import Sampling


def symbolic(data: dict[str, Any]) -> Sampling:
    """What stands for SamplerParams."""
    return Sampling(**data)


class Recording:
    """The lines of one core's recording."""

    is_open = True

    def __init__(self, decode_sampling: DecodeSampling = symbolic) -> None:
        self.lines: list[str] = []
        self._decode_sampling = decode_sampling

    def find(self, do: str, is_wanted: Callable[[dict[str, Any]], object]) -> int:
        """The index of the first line of this input that is wanted."""
        for index, line in enumerate(self.lines):
            data = json.loads(line)
            if data.get("do") == do and is_wanted(data):
                return index
        raise LookupError(do)

    def change(self, index: int, change: Callable[[dict[str, Any]], object]) -> None:
        """Let `change` edit what a line says."""
        data = json.loads(self.lines[index])
        change(data)
        self.lines[index] = json.dumps(data)

    def write(self, line: str) -> None:
        self.lines.append(line)

    def fail(self, reason: object) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        self.is_open = False

    def header(self) -> Header:
        return decode_header(self.lines[0])

    def entries(self) -> Iterator[Entry]:
        for number, line in enumerate(self.lines[1:], start=2):
            yield decode_entry(number, line, self._decode_sampling)

    def replay(self) -> Summary:
        return ExactReplay(self.header()).run(self.entries())


class Recorder:
    """Makes cores that record."""

    def __init__(self, *, with_plans: bool = False) -> None:
        self.recordings: list[Recording] = []
        """One per core, in order."""
        self._with_plans = with_plans

    def make_core(self, config: SchedulerConfig) -> RecordingCore:
        self.recordings.append(Recording())
        return RecordingCore(config, self.recordings[-1], with_plans=self._with_plans)

    def check(self) -> None:
        """Every core's life gives the same plans and outputs again."""
        for recording in self.recordings:
            assert recording.replay().is_exact


def random_life(driver: CoreDriver, seed: int, num_moves: int) -> None:
    """Arrivals, ends, losses and steps in random order, until nothing is left to do."""
    rng = Random(seed)
    driver.add_worker_group(make_capacity("g0"))
    driver.add_worker_group(make_capacity("g1", num_gpu_blocks=12))
    for _ in range(num_moves):
        group_id = rng.choice(list(driver.links))
        live = [record for record in driver.records.values() if record.is_live]
        draw = rng.random()
        if draw < 0.08:
            _submit(driver, rng)
        elif draw < 0.09 and live:
            rng.choice([driver.cancel, driver.abort])(rng.choice(live))
        elif draw < 0.095:
            driver.lose_worker_group(group_id)
            driver.add_worker_group(make_capacity(group_id))
        elif draw < 0.1:
            driver.expire(rng.choice([0.01, 1.0]))
        elif draw < 0.55:
            driver.schedule(group_id)
        else:
            driver.deliver(group_id)
            driver.collect()
    driver.run_until_idle()


def _submit(driver: CoreDriver, rng: Random) -> None:
    logprobs = rng.random() < 0.2
    with suppress(QueueFull, PromptTooLong):
        driver.submit(
            prompt=[rng.randrange(4) for _ in range(rng.randint(1, 45))],
            max_tokens=rng.randint(1, 25),
            n=rng.choice([1, 1, 2, 3]),
            sampling=Sampling(seed=rng.randrange(99), logprobs=logprobs, prompt_logprobs=logprobs),
            stop_token_ids=frozenset({3} if rng.random() < 0.5 else ()),
            frontend_id=rng.choice(["f0", "f1"]),
            timeout=rng.choice([None, None, 0.5]),
        )
