"""Counts of the core's state, for status pages and metrics."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Running totals since the core's start."""

    num_finished: int = 0
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSnapshot:
    """One worker group."""

    group_id: str
    model: str
    draining: bool
    num_gpu_blocks: int
    num_free_gpu_blocks: int
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    """Not needed by swapped-out sequences."""
    num_running_sequences: int
    num_steps: int
    """Results received since the group joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSnapshot:
    """The whole core. Requests are counted once: as running, else swapped, else waiting."""

    num_waiting: int
    num_running: int
    num_swapped: int
    num_finished: int
    """Requests ended since start, for any reason."""
    num_generated_tokens: int
    """Output tokens delivered since start."""
    num_prefill_tokens: int
    """Tokens computed by prefills since start, recomputed ones included."""
    num_preemptions: int
    num_swapped_out_blocks: int
    """Blocks moved from devices to hosts since start."""
    num_swapped_in_blocks: int
    """And back."""
    groups: list[GroupSnapshot] = field(default_factory=list)
