"""Decoder-only models over a paged KV cache.

    interface.py           the model protocol of the runner, and what a model is built with
    registry.py            from an architecture's name to a native model
    llama.py gpt.py        native models: Llama, Mistral, Qwen2, Qwen3; GPT-2, OPT
    eagle.py               the draft head of EAGLE-3
    native.py              what they share: construction, forward pass, weights, packing
    layers.py linear.py    the layers they are made of; packed and sharded linear layers
    transformers_backend/  every other model of `transformers`, with its attention replaced

All sequences of a step are flattened to one axis of rows. A model writes the rows' keys and values
into the cache and attends over it; it knows nothing of requests, and keeps no state of its own.
"""
