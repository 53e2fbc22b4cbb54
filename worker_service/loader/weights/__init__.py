"""The weights of a model.

| file | holds |
| --- | --- |
| `checkpoint.py` | weight files and their tensors |
| `fill.py` | filling and packing the layers of a model |
| `kv_scales.py` | scales of an fp8 KV cache |
| `rounded_cache.py` | an on-disk cache of weights quantized by `--quantization` |
"""
