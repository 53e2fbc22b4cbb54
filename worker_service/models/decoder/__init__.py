"""Decoders of all families, composed from specifications.

per_layer.py   embeddings that each layer has of its own (Gemma 3n and 4)
altup.py       several residual streams, which layers predict and correct (Gemma 3n)
hyper.py       several residual streams, of which parts of layers read weighted sums
specs.py       what a family is: `DecoderSettings`, of a `LayerSpec` for each layer
names.py       names of tensors in checkpoints
inputs.py      what is made of the rows of the embedding before the first layer
layer.py       a layer
model.py       the model: embeddings, layers and head
draft_head.py  draft heads (EAGLE-3, multi-token prediction)
"""
