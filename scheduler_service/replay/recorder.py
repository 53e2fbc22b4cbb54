"""A scheduler core that records its inputs; a deployment that does not record does not use it."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from scheduler_service.core import SchedulerConfig, SchedulerCore, StepPlan
from scheduler_service.replay import recording
from scheduler_service.replay.recording_file import RecordingWriter
from service_common.version import VERSION

logger = logging.getLogger(__name__)


class RecordingCore(SchedulerCore):
    """A core that records the calls of INPUTS and their outcomes."""

    def __init__(
        self, config: SchedulerConfig, lines: RecordingWriter, *, with_plans: bool = False
    ) -> None:
        """`with_plans`: record whole plans, not only their hashes."""
        super().__init__(config)
        self._with_plans = with_plans
        self._outcomes = recording.Outcomes()
        self._lines = lines
        self._is_in_call = False
        """Whether a recorded call is in progress; calls from within the core are not inputs."""
        lines.write(_header(config).model_dump_json())

    def close(self) -> None:
        """Complete the recording. The core is not used after this."""
        self._lines.close()

    def _record(
        self, method: str, arguments: dict[str, Any], returned: Any, error: Exception | None
    ) -> None:
        if not self._lines.is_open:
            return
        try:
            self._lines.write(self._line(method, arguments, returned, error))
        except Exception as problem:  # a bug of the recorder must not fail a request
            logger.exception("input cannot be recorded do=%s", method)
            self._lines.fail(problem)

    def _line(
        self, method: str, arguments: dict[str, Any], returned: Any, error: Exception | None
    ) -> str:
        line = recording.LINES[method](
            do=method,
            **arguments,
            raised=None if error is None else self._outcomes.of_error(error),
            chain=self._outcomes.chain_with(returned),
            plan=returned if self._with_plans and isinstance(returned, StepPlan) else None,
        )
        return recording.to_json(line).decode()


def _header(config: SchedulerConfig) -> recording.Header:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return recording.Header(software_version=VERSION, recorded_at=now, config=config)


def _recorded(method: str) -> Callable[..., Any]:
    """The core's method, with its calls recorded."""
    inner = getattr(SchedulerCore, method)
    names = tuple(recording.PARAMETERS[method])

    @wraps(inner)
    def call(core: RecordingCore, *args: Any, **kwargs: Any) -> Any:
        if core._is_in_call:
            return inner(core, *args, **kwargs)
        arguments = dict(zip(names, args, strict=False), **kwargs)
        core._is_in_call = True
        try:
            returned = inner(core, *args, **kwargs)
        except Exception as error:
            core._record(method, arguments, None, error)
            raise
        finally:
            core._is_in_call = False
        # Most calls find no outputs, and change nothing.
        if returned or method != "pop_outboxes":
            core._record(method, arguments, returned, None)
        return returned

    return call


for _method in recording.INPUTS:
    setattr(RecordingCore, _method, _recorded(_method))
