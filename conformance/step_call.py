"""The call of ExecuteSteps: messages of plans and of results, and how the call ends."""

import queue
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from conformance.assertions import Failed, expect_true, fail
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status that ended a stream or a call."""

    code: grpc.StatusCode
    message: str

    def expect(self, code: grpc.StatusCode, *names: str) -> None:
        """Fail unless it has this code, and names one of these fields, if any."""
        got = f"{self.code.name} ({self.message})"
        expect_true(self.code is code, f"expected the status {code.name}, got {got}")
        field_name = self.message.partition(":")[0]
        if names:
            found = any(name in field_name for name in names)
            wanted = " or ".join(names)
            expect_true(found, f"expected a message that begins with `{wanted}:`, got {got}")


class StepCall:
    """One call, whose messages are sent and received when the kit chooses."""

    def __init__(self, stub: WorkerServiceStub, timeout_s: float) -> None:
        self._requests: queue.SimpleQueue[pb.ExecuteStepsRequest | None] = queue.SimpleQueue()
        self._call = stub.ExecuteSteps(iter(self._requests.get, None), timeout=timeout_s)
        self._results: deque[plan_pb2.StepResult] = deque()
        """Results that arrived together with earlier ones."""

    def send(self, plans: Iterable[plan_pb2.StepPlan]) -> None:
        """Send plans in one message."""
        self._requests.put(pb.ExecuteStepsRequest(plans=plans))

    def next_result(self) -> plan_pb2.StepResult:
        """The next result."""
        if self._results:
            return self._results.popleft()
        try:
            message = next(self._call)
        except StopIteration:
            fail("the stream ended instead of returning a result")
        if not message.results:
            fail("a message holds no result")
        self._results.extend(message.results)
        return self._results.popleft()

    def refusal(self) -> Refusal:
        """The error that ends the stream; no result may precede it."""
        try:
            came = f"the result of step {next(self._call).results[0].step_id}"
        except StopIteration:
            came = "its end with OK"
        except grpc.RpcError as error:
            return Refusal(error.code(), error.details() or "")
        raise Failed(f"expected the stream to end with an error, got {came}")

    def send_no_more(self) -> None:
        """Close the sending side of the stream."""
        self._requests.put(None)

    def finish(self) -> None:
        """Send no more; fail unless the stream then ends with OK."""
        self.send_no_more()
        for response in self._call:
            fail(f"the result of step {response.results[0].step_id} came without a plan")

    def cancel(self) -> None:
        """Cancel the stream."""
        self._call.cancel()
