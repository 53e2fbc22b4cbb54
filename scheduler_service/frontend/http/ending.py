"""How a choice has ended."""

from pagewire.v1 import inference_service_pb2 as inference_pb

FINISH_REASONS = {
    inference_pb.FINISH_REASON_UNSPECIFIED: None,
    inference_pb.FINISH_REASON_STOP: "stop",
    inference_pb.FINISH_REASON_LENGTH: "length",
}


def stop_reason(delta: inference_pb.ChoiceDelta) -> int | str | None:
    """vLLM's field: what ended the choice, if it was no end-of-sequence token."""
    kind = delta.WhichOneof("stop_reason")
    return getattr(delta, kind) if kind is not None else None
