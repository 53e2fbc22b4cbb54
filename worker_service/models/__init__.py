"""Decoder-only models over a paged KV cache.

    interface.py           what the model runner needs of a model, whoever wrote it
    registry.py            from an architecture's name to one of our own models
    llama.py opt.py gpt2.py
                           our own models: Llama, Mistral, Qwen2, Qwen3; OPT; GPT-2
    native.py              what they share: where weights go, autograd off, packing
    layers.py linear.py rotary.py
                           the layers they are made of
    transformers_route.py  every other model of `transformers`, with its attention replaced

All sequences of a step are flattened to one axis of rows. A model writes the rows' keys and values
into the cache and attends over it; it knows nothing of requests, and keeps no state of its own.
"""
