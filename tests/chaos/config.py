"""Options of a run: what is disturbed, and how much."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """How much is disturbed, and what."""

    seed: int = 0
    num_kills: int = 20
    """Least number of SIGKILLs; there may be a few more."""
    num_streams: int = 40
    """Least number of streams."""
    time_limit_s: float = 3600.0
    """Time limit, including the undisturbed run, after which nothing is started; the report states
    what was reached."""
    num_asks: int = 24
    """Number of different requests, which streams repeat."""
    dtype: str = "float32"
    device: str = "auto"
    """Of the workers, as their flag."""
    batch_invariant: bool = False
    """Whether workers on a GPU compute every row as if it were alone."""
    preemption_mode: str | None = None
    """As the core's flag; None: drawn."""
    speculative: str = "no"
    """What drafts tokens: ngram, draft (the model itself), eagle (a random head), or no. The
    undisturbed run has none."""
    num_workers: int = 3
    num_ranks: int = 1
    """Hosts of each worker, which share every layer; more than one needs namespaces."""
    has_bad_links: bool = False
    """Whether all links, but those between ranks, lose 2 % of their packets, delay them by
    50 ms and reorder some; needs namespaces."""
    num_frontends: int = 2
    max_open_streams: int = 12
    num_monkeys: int = 4
    """Most concurrent disturbances."""
    mean_pause_s: float = 0.5
    """Mean time between the end of a disturbance and the start of the next."""
    lease_s: float = 5.0
    """Longer than a worker may starve on a busy machine, so that only some leases end."""
    patience_s: float = 180.0
    """Time without output after which a stream counts as hung; for answers that arrive whole, such
    as those of beam searches, time after the last disturbance."""
    network: str = "auto"
    """namespaces, relays, or auto: namespaces where they are permitted."""
