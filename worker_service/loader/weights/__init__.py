"""The weights of a model.

| file | holds |
| --- | --- |
| `checkpoint.py` | reading weights, packing them while loading, scales of an fp8 KV cache |
| `rounded_cache.py` | an on-disk cache of weights quantized by `--quantization` |
"""
