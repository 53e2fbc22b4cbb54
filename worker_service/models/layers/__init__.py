"""Layers of native models. Rows are tokens, flattened over all sequences.

norms.py            RMS norms and layer norms
gated_norm.py       RMS norms whose rows are multiplied by gates of their own
activations.py      activations by their names in `config.json`, and xIELU
rotary.py           rotary position embeddings, and their scaling to longer contexts
paged_attention.py  attention over the paged cache
vector.py           numbers that belong to no linear layer and no norm
"""
