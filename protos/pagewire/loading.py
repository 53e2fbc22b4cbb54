"""How far a worker has loaded its model, in words: the same in errors, commands and the client."""

from pagewire.v1.status_pb2 import WorkerLoading


def describe_load(load: WorkerLoading) -> str:
    """The phase, with its share and the time left as far as they are known."""
    share = f" {100 * load.done_bytes // load.total_bytes} %" if load.total_bytes else ""
    has_rest = load.HasField("remaining_s")
    return f"{load.phase}{share}{f', about {load.remaining_s:.0f} s left' if has_rest else ''}"
