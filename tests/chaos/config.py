"""Options of a run: what is disturbed, and how much."""

from dataclasses import dataclass, field
from typing import Any


def option(default: object, flag: str, help: str = "") -> Any:
    """A field that is a flag of the command line too."""
    return field(default=default, metadata={"flag": flag, "help": help})


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """How much is disturbed, and what."""

    seed: int = option(0, "--seed", "Seed of requests and disturbances.")
    num_kills: int = option(20, "--kills", "Least number of SIGKILLs; a few more may be sent.")
    num_streams: int = option(40, "--streams", "Least number of streams.")
    time_limit_s: float = option(
        3600.0,
        "--time-limit",
        "Seconds, with the undisturbed run, after which nothing is started; the report states what "
        "was reached.",
    )
    num_asks: int = option(24, "--requests", "Number of different requests, which streams repeat.")
    family: str = option(
        "",
        "--family",
        "Of tests/support/checkpoints.py: a tiny random model instead of the embedded one.",
    )
    num_adapters: int = option(
        0, "--adapters", "LoRA adapters of the model; all but one request in as many name one."
    )
    dtype: str = option("float32", "--dtype", "float32 or bfloat16.")
    device: str = option("auto", "--device", "Of the workers, as their flag.")
    batch_invariant: bool = option(False, "--batch-invariant")
    preemption_mode: str | None = option(
        None, "--preemption-mode", "auto, swap or recompute; drawn unless given."
    )
    speculative: str = option(
        "no",
        "--speculative",
        "What drafts tokens: ngram, draft (the model itself), eagle (a random head), mtp (one in "
        "the checkpoint of --family), or no. The undisturbed run has none.",
    )
    num_workers: int = option(3, "--workers")
    num_ranks: int = option(
        1, "--ranks", "Hosts of each worker, which share every layer; several need namespaces."
    )
    has_bad_links: bool = option(
        False,
        "--bad-links",
        "All links, but those between ranks, lose 2 % of their packets, delay them by 50 ms and "
        "reorder some; needs namespaces.",
    )
    num_embedders: int = option(0, "--embedders", "Workers that make vectors of texts, besides.")
    num_texts: int = option(100, "--texts", "Texts in one call for vectors.")
    num_frontends: int = option(2, "--frontends")
    max_open_streams: int = option(12, "--open-streams", "Most concurrent streams.")
    num_monkeys: int = option(4, "--at-once", "Most concurrent disturbances.")
    mean_pause_s: float = option(
        0.5, "--pause", "Mean seconds between the end of a disturbance and the start of the next."
    )
    lease_s: float = option(5.0, "--lease")
    """Longer than a worker may starve on a busy machine, so that only some leases end."""
    patience_s: float = option(
        180.0,
        "--patience",
        "Seconds without output after which a stream counts as hung; for answers that arrive "
        "whole, such as those of beam searches, seconds after the last disturbance.",
    )
    network: str = option(
        "auto", "--network", "namespaces, relays, or auto: namespaces where they are permitted."
    )
