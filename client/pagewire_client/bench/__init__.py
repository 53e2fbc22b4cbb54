"""Load on a running deployment, and what came of it.

| module | holds |
| --- | --- |
| `workload` | prompts, lengths and arrival times, the same ones for the same seed |
| `target` | what is loaded: a `Target` streams one answer; `PagewireTarget` is ours |
| `generator` | sends each request when it is due, and notes when tokens come |
| `record` | those notes, one `Record` per request |
| `summary` | percentiles, rates and goodput of many records |

Neither servers nor printing are here: one generator loads whatever a `Target` is written for.
"""

from pagewire_client.bench.load_generator import LoadRun
from pagewire_client.bench.summary import Limits, Percentiles, Summary, percentile
from pagewire_client.bench.workload import Arrival, Lengths, Workload
from pagewire_client.load.record import Record
from pagewire_client.load.target import PagewireTarget, Target

__all__ = [
    "Arrival",
    "Lengths",
    "Limits",
    "LoadRun",
    "PagewireTarget",
    "Percentiles",
    "Record",
    "Summary",
    "Target",
    "Workload",
    "percentile",
]
