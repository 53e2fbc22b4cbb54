"""Decoder-only models over a paged KV cache, and text encoders without one.

Modules and folders form layers: each imports only those above it.

    kv_cache_spec.py       what layers keep, cache groups, and where layers lie in a block
    interface.py           the model protocol of the runner, and what a model is built with
    layers/                norms, activations, rotary embeddings, attention over the paged cache
    linear/                packed and sharded linear layers, and what adapters add to them
    pooling.py             what follows the pooling: dense layers, the labels of a classifier
    native.py              base classes of native models: forward pass, weights, packing
    mixers/                how tokens affect each other: attention, and parts that keep a state
    feed_forward/          what follows: MLPs and experts
    adapters.py            what adapters of rows add to the products of linear layers
    decoder/               native decoders of all families, composed from specifications
    decoder_families/      their specifications, by kinship: Llama, Gemma, mixtures of experts …
    encoders/              text encoders, and their families
    registry.py            from an architecture's name to a native model
    transformers_backend/  every other model of `transformers`, with its attention replaced

All sequences of a step are flattened to one axis of rows. A model writes the keys and values of
the rows to the cache and attends over it, or updates states in it. It knows nothing of requests,
and keeps nothing outside of the cache.
"""
