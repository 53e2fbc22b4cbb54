"""Options of a run: what is disturbed, and how much."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """How much is disturbed, and what."""

    seed: int = 0
    num_kills: int = 20
    """SIGKILLs after which it is enough; more may be under way."""
    num_streams: int = 40
    """Streams, at least."""
    time_limit_s: float = 3600.0
    """Time, the undisturbed run's included, after which nothing is begun; the report says what was
    reached until then."""
    num_asks: int = 24
    """Different requests, which streams make again and again."""
    dtype: str = "float32"
    num_workers: int = 3
    num_frontends: int = 2
    max_open_streams: int = 12
    num_monkeys: int = 4
    """Disturbances at a time, at most."""
    mean_pause_s: float = 0.5
    """Between one disturbance's end and the next one's begin."""
    lease_s: float = 5.0
    """Longer than a worker may starve on a busy machine, so that only some leases end."""
    patience_s: float = 180.0
    """Time without output after which a stream counts as hung."""
    network: str = "auto"
    """namespaces, relays, or auto: namespaces where they are permitted."""
