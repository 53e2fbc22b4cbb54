"""One step.

| file | holds |
| --- | --- |
| `step_rows.py` | a plan's rows, checked against the table |
| `inputs.py` | the flattened inputs of the forward pass |
| `forward.py` | the forward pass on the host |
| `sampling.py` | what a step samples and reports |
| `pooling.py` | vectors of a step's hidden states |
| `step_outcome.py` | tokens, log probabilities and failures of a step by row |
| `step_messages.py` | what the rank that samples broadcasts to the hosts of the others |
| `rank_outcomes.py` | the exchange of outcomes between ranks |
| `micro_batches.py` | parts of a step, computed one after the other by the stages of a pipeline |
"""
