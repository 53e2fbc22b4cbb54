"""What the tries at one request have in common."""

from hashlib import blake2b

from pagewire.v1 import inference_service_pb2 as inference_pb

FINGERPRINT_BYTES = 16


def fingerprint(request: inference_pb.GenerateRequest) -> bytes:
    """A hash of the prompt and of all parameters but the seed, which a client may learn only from
    the first response."""
    wish = inference_pb.GenerateRequest()
    wish.CopyFrom(request)
    wish.ClearField("request_id")
    wish.ClearField("attempt")
    wish.ClearField("resume")
    wish.ClearField("priority")
    wish.ClearField("max_hold_ms")
    wish.ClearField("model")  # absent or named; the core compares which it is
    wish.sampling_params.ClearField("seed")
    if not wish.sampling_params.ByteSize():  # there for the seed alone, perhaps
        wish.ClearField("sampling_params")
    data = wish.SerializeToString(deterministic=True)
    return blake2b(data, digest_size=FINGERPRINT_BYTES).digest()
