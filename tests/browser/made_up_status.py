"""A made-up large deployment: its core's status, second by second."""

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import status_pb2 as pb

BLOCK_SIZE = 16
GROWTH = 3
"""Blocks that a request grows by in a second: 48 tokens."""
CACHED = -1


@dataclass(slots=True)
class Request:
    """One that is being decoded."""

    number: int
    group: int
    started_s: float
    num_prompt: int
    table: list[int] = field(default_factory=list)


class MadeUpEngine:
    """Worker groups whose memory is nearly full, of requests that grow, end and begin."""

    def __init__(
        self,
        *,
        num_groups: int,
        num_blocks: int,
        num_requests: int,
        ending: float = 0.03,
        seed: int = 1,
    ) -> None:
        """`ending`: the share of requests that end in a second, and are followed by others."""
        self._ending = ending
        self._draw = random.Random(seed)
        self._num_blocks = num_blocks
        self._owners: list[NDArray[np.int32]] = [
            np.zeros(num_blocks, np.int32) for _ in range(num_groups)
        ]
        self._references = [np.zeros(num_blocks, np.uint8) for _ in range(num_groups)]
        self._free = [self._shuffled(num_blocks) for _ in range(num_groups)]
        self._prompt_blocks = num_blocks * num_groups * 8 // 10 // max(1, num_requests)
        self._num_begun = self._num_ended = 0
        self._uptime_s = 100.0
        self._requests = [self._begin(index % num_groups) for index in range(num_requests)]

    def next_status(self) -> pb.EngineStatus:
        """The state after one more second, with requests and block maps."""
        self._uptime_s += 1.0
        for place, request in enumerate(self._requests):
            if self._draw.random() < self._ending:
                self._end(request)
                self._requests[place] = self._begin(request.group)
            else:
                self._grow(request, GROWTH)
        status = pb.EngineStatus(
            uptime_s=self._uptime_s,
            version="0.1.0",
            models=["made up"],
            num_running=len(self._requests),
            num_frontends=1,
            num_finished=self._num_ended,
            num_generated_tokens=int(self._uptime_s * len(self._requests) * 48),
        )
        status.requests.extend(map(self._tell_request, self._requests))
        status.groups.extend(map(self._tell_group, range(len(self._owners))))
        return status

    def _begin(self, group: int) -> Request:
        self._num_begun += 1
        blocks = self._draw.randint(self._prompt_blocks // 2, self._prompt_blocks)
        request = Request(self._num_begun, group, self._uptime_s, blocks * BLOCK_SIZE)
        self._grow(request, blocks)
        for block in request.table[: self._draw.choice((0, 0, 64))]:
            self._references[group][block] = 3
        return request

    def _grow(self, request: Request, blocks: int) -> None:
        free = self._free[request.group]
        taken = [free.pop() for _ in range(min(blocks, len(free)))]
        request.table += taken
        self._owners[request.group][taken] = request.number
        self._references[request.group][taken] = 1

    def _end(self, request: Request) -> None:
        self._num_ended += 1
        self._owners[request.group][request.table] = CACHED
        self._references[request.group][request.table] = 0
        self._free[request.group][:0] = request.table

    def _shuffled(self, count: int) -> list[int]:
        """Free blocks as they are after a while: in runs, but not in order."""
        runs = [list(range(start, min(start + 40, count))) for start in range(0, count, 40)]
        self._draw.shuffle(runs)
        return [block for run in runs for block in run]

    def _tell_request(self, request: Request) -> pb.RequestStatus:
        table = np.asarray(request.table, "<i4")
        return pb.RequestStatus(
            request_id=f"made-up-request-{request.number}",
            number=request.number,
            model="made up",
            group_id=f"worker-{request.group}",
            state=pb.REQUEST_STATE_DECODING,
            num_prompt_tokens=request.num_prompt,
            num_output_tokens=int(48 * (self._uptime_s - request.started_s)),
            num_drafts=40 * request.number,
            num_accepted_drafts=30 * request.number,
            num_sequences=1,
            accepted_at_s=request.started_s,
            events=[
                pb.REQUEST_EVENT_QUEUED,
                pb.REQUEST_EVENT_STARTED,
                pb.REQUEST_EVENT_FIRST_TOKEN,
            ],
            event_times_us=[0, 10_000, 20_000],
            event_values=[request.num_prompt, request.num_prompt, 0],
            block_tables=[table.tobytes()],
        )

    def _tell_group(self, group: int) -> pb.WorkerGroupStatus:
        running = sum(request.group == group for request in self._requests)
        return pb.WorkerGroupStatus(
            group_id=f"worker-{group}",
            state=pb.WORKER_STATE_READY,
            model="made up",
            num_gpu_blocks=self._num_blocks,
            num_free_gpu_blocks=len(self._free[group]),
            num_running_sequences=running,
            max_num_seqs=256,
            block_size=BLOCK_SIZE,
            decode_step_us=20_000,
            num_steps=int(50 * self._uptime_s),
            cache_groups=[
                pb.CacheGroupStatus(
                    lifetime="growing",
                    block_tokens=BLOCK_SIZE,
                    num_used_blocks=self._num_blocks - len(self._free[group]),
                ),
                pb.CacheGroupStatus(
                    lifetime="state", num_state_blocks=4, num_used_blocks=4 * running
                ),
            ],
            gpu_blocks=pb.BlockMap(
                owners=self._owners[group].astype("<i4").tobytes(),
                num_references=self._references[group].tobytes(),
            ),
        )
