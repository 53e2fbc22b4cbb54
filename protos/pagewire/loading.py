"""How far a worker has loaded its model, in words: the same in errors, commands and the client."""


def describe_load(phase: str, done_bytes: int, total_bytes: int, remaining_s: float | None) -> str:
    """The phase, with its share and the time left as far as they are known, as `WorkerLoading`
    says it; remaining_s: None if it is absent there."""
    share = f" {100 * done_bytes // total_bytes} %" if total_bytes else ""
    rest = "" if remaining_s is None else f", about {remaining_s:.0f} s left"
    return f"{phase}{share}{rest}"
