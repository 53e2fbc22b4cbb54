"""The minimum time of a workload by the machine's memory bandwidth and arithmetic throughput.

A step reads all weights once, of experts those that are chosen, the keys and values that its rows
attend over, and the states of its sequences; or it is bound by its matrix products, if these take
longer. The floor of a workload is the sum over the steps of an ideal scheduler: all requests arrive
at the start, every step has all decodes, prompts fill the rest of its token budget, shared prefixes
are computed once and read once per step, and no time passes between the steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.engines.workloads import Job
from benchmarks.measuring.ceilings import Ceilings
from benchmarks.models.model_shapes import BYTES_PER_VALUE, Shape
from benchmarks.models.quantized_layers import BITS_PER_WEIGHT, Bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A sequence's part in a step."""

    num_tokens: int
    """Computed now."""
    context: int
    """Attended over by the last of them, itself included."""
    samples: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One forward pass."""

    rows: list[Row]
    shared: int
    """Length of the prefix that all contexts share."""

    @property
    def num_tokens(self) -> int:
        """Computed in all."""
        return sum(row.num_tokens for row in self.rows)

    def num_bytes(self, shape: Shape, dtype: str) -> int:
        """Weights, KV and states read, and new KV and states written."""
        dense = 8 * BYTES_PER_VALUE[dtype]
        bits = BITS_PER_WEIGHT.get(shape.weights or "", Bits(layers=dense))
        weights = shape.weights_read(self.num_tokens) * bits.layers / 8
        if any(row.samples for row in self.rows):
            weights += shape.output_weights * (bits.head or dense) / 8
        own = sum(row.context - self.shared for row in self.rows)
        kv_tokens = own + self.shared + self.num_tokens
        states = 2 * 4 * shape.state_values * len(self.rows)  # read and written
        return int(weights) + kv_tokens * shape.kv_bytes(dtype) + states

    def num_flops(self, shape: Shape) -> int:
        """Operations of the matrix products and of attention."""
        num_sampled = sum(row.samples for row in self.rows)
        linear = shape.layer_weights * self.num_tokens + shape.output_weights * num_sampled
        # The n-th last token of a row attends over n - 1 fewer than the last.
        pairs = sum(
            row.num_tokens * row.context - row.num_tokens * (row.num_tokens - 1) // 2
            for row in self.rows
        )
        return 2 * (linear + shape.attention_products * pairs)


class _Sequence:
    def __init__(self, job: Job, computed: int) -> None:
        self.prompt_tokens = len(job.prompt)
        self.computed = computed
        self.left = job.num_output_tokens

    @property
    def is_decoding(self) -> bool:
        return self.computed >= self.prompt_tokens

    def advance(self, num_tokens: int) -> Row:
        self.computed += num_tokens
        samples = self.computed >= self.prompt_tokens
        self.left -= samples
        return Row(num_tokens=num_tokens, context=self.computed, samples=samples)


def ideal_steps(jobs: Sequence[Job], max_num_batched_tokens: int) -> Iterator[Step]:
    """The steps of the scheduler described above."""
    shared = _shared(jobs)
    # The last token of a prompt is always computed: its logits are needed.
    live = [
        _Sequence(job, min(shared, len(job.prompt) - 1) if index else 0)
        for index, job in enumerate(jobs)
    ]
    while live:
        rows = [sequence.advance(1) for sequence in live if sequence.is_decoding]
        budget = max_num_batched_tokens - len(rows)
        for sequence in live:
            wanted = sequence.prompt_tokens - sequence.computed
            if wanted > 0 and budget > 0:
                taken = min(wanted, budget)
                budget -= taken
                rows.append(sequence.advance(taken))
        yield Step(rows=rows, shared=min(shared, *(row.context for row in rows)))
        live = [sequence for sequence in live if sequence.left > 0]


def _shared(jobs: Sequence[Job]) -> int:
    """Length of the prefix that all prompts share, if there are several."""
    if len(jobs) < 2:
        return 0
    columns = zip(*(job.prompt for job in jobs), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def floor_seconds(
    jobs: Sequence[Job], shape: Shape, dtype: str, ceilings: Ceilings, max_num_batched_tokens: int
) -> float:
    """The minimum time for all jobs."""
    return sum(
        max(
            step.num_bytes(shape, dtype) / ceilings.read_bytes_per_s,
            step.num_flops(shape) / ceilings.flops_per_s,
        )
        for step in ideal_steps(jobs, max_num_batched_tokens)
    )
