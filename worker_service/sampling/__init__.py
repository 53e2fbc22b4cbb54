"""The sampler: from a step's logits to one token per row.

| file | holds |
| --- | --- |
| `sampler.py` | the order of operations, greedy choice, failed rows |
| `params.py`, `table.py` | a sequence's parameters; those of all sequences as columns by slot |
| `edits.py`, `bad_words.py`, `occurrences.py` | exclusions, biases and penalties |
| `masking.py` | what constraints exclude |
| `draw.py` | min-p, top-k, top-p, and the draw |
| `philox.py` | counter-based random numbers |
| `logprobs.py`, `entries.py` | log probabilities and ranks; how a result holds them |
| `candidates.py` | where the core chooses: the tokens among which it does |
| `upload.py` | numbers to a device without waiting for it |

A row's outcome depends on its own logits, parameters and tokens only: bitwise, on the CPU, whatever
else is in the batch. No function keeps state between steps; what must be remembered of a sequence
is in `SamplingTable`. On a GPU `worker_service/runner/device_sampler.py` samples, with the edits of this
package.

Nothing is imported here: `params.py` and `entries.py` serve a worker that has no torch.
"""
