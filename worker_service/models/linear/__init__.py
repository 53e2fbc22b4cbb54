"""Products with weights.

packing.py     packing a weight for the device, quantized or not
additions.py   what adapters may add to products
linear.py      linear layers: plain, before an activation, row-parallel, of a float32 weight
heads.py       products of heads, each with a weight of its own
vocabulary.py  embeddings and LM heads
"""
