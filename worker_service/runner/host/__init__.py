"""Steps that the host computes at once: `steps.py` from a plan to its outcome, `sampling.py` the
tokens of a batch's rows."""
