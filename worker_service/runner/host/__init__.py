"""Steps that the host computes at once; `forward.py` is their forward pass."""
