"""The sampler: from a step's logits to one token per row.

| file | holds |
| --- | --- |
| `sampler.py` | the order of operations, greedy choice, failed rows |
| `params.py`, `table.py` | a sequence's parameters; those of all sequences as columns by slot |
| `edits.py`, `bad_words.py`, `occurrences.py` | exclusions, biases and penalties |
| `draw.py` | min-p, top-k, top-p, and the draw |
| `philox.py` | counter-based random numbers |
| `logprobs.py` | log probabilities and ranks |

A row's outcome depends on its own logits, parameters and tokens only: bitwise, on the CPU, whatever
else is in the batch. No function keeps state between steps; what must be remembered of a sequence
is in `SamplingTable`.
"""

from worker_service.sampler.edits import EditedRow
from worker_service.sampler.sampler import NO_TOKEN, Samples, SamplingBatch, sample
from worker_service.sampler.table import SamplingTable

__all__ = ["NO_TOKEN", "EditedRow", "Samples", "SamplingBatch", "SamplingTable", "sample"]
