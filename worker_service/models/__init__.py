"""Decoder-only models over a paged KV cache, and text encoders without one.

    interface.py           the model protocol of the runner, and what a model is built with
    kv_cache_spec.py       what layers keep, cache groups, and where layers lie in a block
    registry.py            from an architecture's name to a native model
    decoder.py             native decoders of all families, composed from specifications
    latent_attention.py    attention over latents of keys and values (DeepSeek)
    mamba.py               Mamba and Mamba-2, alone or beside attention
    recurrent_unit.py      gated linear recurrent units (RecurrentGemma)
    convolution.py         causal convolutions, which keep their last inputs (LFM2)
    delta_net.py           gated delta nets, whose heads keep a matrix (Qwen3-Next, Kimi)
    per_layer.py           embeddings that each layer has of its own (Gemma 3n and 4)
    altup.py               several residual streams (Gemma 3n)
    experts.py             mixture of experts: router, experts, shared experts
    dense_and_experts.py   an MLP and experts in one layer (Gemma 4)
    decoder_families/      their specifications, by kinship: Llama, Gemma, mixtures of experts …
    encoder.py             text encoders of all families, composed from settings
    encoder_families.py    those settings: BERT, RoBERTa, MPNet, DistilBERT, ModernBERT, nomic-bert
    draft_head.py          draft heads (EAGLE-3)
    native.py              base classes of native models: forward pass, weights, packing
    layers.py linear.py    the layers of native models; packed and sharded linear layers
    adapters.py            what adapters of rows add to the products of linear layers
    pooling.py             what follows the pooling: dense layers, the labels of a classifier
    transformers_backend/  every other model of `transformers`, with its attention replaced

All sequences of a step are flattened to one axis of rows. A model writes the keys and values of
the rows to the cache and attends over it, or updates states in it. It knows nothing of requests,
and keeps nothing outside of the cache.
"""
