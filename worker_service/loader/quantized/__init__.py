"""Quantized checkpoints, of which other code sees dense names only.

| file | holds |
| --- | --- |
| `formats.py` | a table of the tensors that make up a quantized weight |
| `schemes.py` | `quantization_config`, and quantized weights under dense names |
"""
