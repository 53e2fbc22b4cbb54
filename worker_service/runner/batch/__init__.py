"""One step.

| file | holds |
| --- | --- |
| `step_rows.py` | a plan's rows, and the flattened inputs of the forward pass |
| `step_outcome.py` | tokens, log probabilities and failures of a step by row |
| `micro_batches.py` | parts of a step, computed one after the other by the stages of a pipeline |
"""
