"""A scheduler core that records its input.

`RecordingCore` stands between the driver and the core. The core does not know it, and a deployment
that does not record does not use it.
"""

import logging
from datetime import UTC, datetime
from typing import Any, Protocol

from scheduler_service.core import (
    CoreSnapshot,
    EngineOutputs,
    Inspection,
    InspectionDetail,
    Request,
    SchedulerConfig,
    SchedulerCore,
    StepPlan,
    StepResult,
    WorkerGroupCapacity,
)
from scheduler_service.core.stats.request_timing import TracedRequest
from scheduler_service.core.stats.throughput import StepWork
from scheduler_service.replay.codec import Codec
from scheduler_service.replay.recording import (
    CODEC,
    PARAMETERS,
    Header,
    Outcomes,
    encode_header,
    to_text,
)
from service_common.version import VERSION

logger = logging.getLogger(__name__)


class Lines(Protocol):
    """Receives the lines of a recording, such as `RecordingWriter`."""

    is_open: bool
    """Whether lines still count."""

    def write(self, line: str) -> None:
        """Take a line, without its end; must not block."""

    def fail(self, why: object) -> None:
        """End the recording where it is."""

    def close(self) -> None:
        """No line follows."""


class RecordingCore:
    """Has the interface of `SchedulerCore`; see there for what the methods do."""

    def __init__(
        self,
        config: SchedulerConfig,
        lines: Lines,
        *,
        with_plans: bool = False,
        codec: Codec = CODEC,
    ) -> None:
        """`with_plans`: record whole plans, not only their hashes."""
        self._core = SchedulerCore(config)
        self._with_plans = with_plans
        self._codec = codec
        self._encoders = {
            method: [(name, codec.converter(kind).encode) for name, kind in parameters.items()]
            for method, parameters in PARAMETERS.items()
        }
        self._outcomes = Outcomes(codec)
        self._lines = lines
        lines.write(to_text(encode_header(codec, _header(config))))

    def close(self) -> None:
        """Complete the recording. The core is not used after this."""
        self._lines.close()

    # Inputs.

    def add_worker_group(self, capacity: WorkerGroupCapacity, now: float) -> None:
        self._call("add_worker_group", capacity=capacity, now=now)

    def remove_worker_group(self, worker_group_id: str, now: float) -> None:
        self._call("remove_worker_group", worker_group_id=worker_group_id, now=now)

    def drain_worker_group(self, worker_group_id: str, now: float) -> None:
        self._call("drain_worker_group", worker_group_id=worker_group_id, now=now)

    def submit(self, request: Request, now: float) -> None:
        self._call("submit", request=request, now=now)

    def cancel(self, frontend_id: str, handle: int, now: float) -> None:
        self._call("cancel", frontend_id=frontend_id, handle=handle, now=now)

    def abort(self, tenant: str, request_id: str, now: float) -> None:
        self._call("abort", tenant=tenant, request_id=request_id, now=now)

    def stop_choice(self, frontend_id: str, handle: int, num_tokens: int, now: float) -> None:
        self._call(
            "stop_choice", frontend_id=frontend_id, handle=handle, num_tokens=num_tokens, now=now
        )

    def remove_frontend(self, frontend_id: str, now: float) -> None:
        self._call("remove_frontend", frontend_id=frontend_id, now=now)

    def expire(self, now: float) -> None:
        self._call("expire", now=now)

    def add_plan_time(self, worker_group_id: str, seconds: float) -> None:
        self._call("add_plan_time", worker_group_id=worker_group_id, seconds=seconds)

    def update(self, worker_group_id: str, result: StepResult, now: float) -> None:
        self._call("update", worker_group_id=worker_group_id, result=result, now=now)

    def schedule(self, worker_group_id: str, now: float) -> StepPlan | None:
        plan: StepPlan | None = self._call("schedule", worker_group_id=worker_group_id, now=now)
        return plan

    def take_outboxes(self) -> dict[str, EngineOutputs]:
        news: dict[str, EngineOutputs] = self._call("take_outboxes")
        return news

    # Methods that change nothing that a plan depends on.

    def take_traced(self) -> list[TracedRequest]:
        return self._core.take_traced()

    def take_woken(self) -> set[str]:
        return self._core.take_woken()

    def is_drained(self, worker_group_id: str) -> bool:
        return self._core.is_drained(worker_group_id)

    def next_deadline(self) -> float | None:
        return self._core.next_deadline()

    def newest_work(self, worker_group_id: str) -> StepWork:
        return self._core.newest_work(worker_group_id)

    def num_requests(self) -> int:
        return self._core.num_requests()

    def snapshot(self) -> CoreSnapshot:
        return self._core.snapshot()

    def inspect(self, detail: InspectionDetail) -> Inspection:
        return self._core.inspect(detail)

    def check(self) -> None:
        self._core.check()

    # Inside.

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            returned = getattr(self._core, method)(**arguments)
        except Exception as error:
            self._record(method, arguments, None, error)
            raise
        # Most calls find no outputs, and change nothing.
        if returned or method != "take_outboxes":
            self._record(method, arguments, returned, None)
        return returned

    def _record(
        self, method: str, arguments: dict[str, Any], returned: Any, error: Exception | None
    ) -> None:
        if not self._lines.is_open:
            return
        try:
            self._lines.write(self._line(method, arguments, returned, error))
        except Exception as problem:  # a bug of the recorder is no reason to fail a request
            logger.exception("input cannot be recorded do=%s", method)
            self._lines.fail(problem)

    def _line(
        self, method: str, arguments: dict[str, Any], returned: Any, error: Exception | None
    ) -> str:
        data: dict[str, Any] = {"do": method}
        for name, encode in self._encoders[method]:
            data[name] = encode(arguments[name])
        if error is not None:
            data["raised"] = self._outcomes.of_error(error)
        if isinstance(returned, StepPlan):
            data["chain"] = self._outcomes.of_plan(returned)
            if self._with_plans:
                data["plan"] = self._codec.encode(StepPlan, returned)
        elif returned:
            data["chain"] = self._outcomes.of_news(returned)
        return to_text(data)


def _header(config: SchedulerConfig) -> Header:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(software_version=VERSION, recorded_at=now, config=config)
