"""GGUF files, as a model of `transformers` with a checkpoint. Headers and the tokenizer are read
without torch, in `worker_service/gguf/`.

| file | holds |
| --- | --- |
| `blocks.py` | a table of the types of quantized tensors |
| `file.py` | metadata, and tensors one at a time, dense or packed |
| `metadata.py` | typed access to the metadata |
| `architectures.py` | a table of the architectures, which is in `classes.txt` |
| `config.py` | the configuration, as that of `transformers` |
| `attention.py`, `rope.py` | sizes of heads, windows; the parameters of RoPE |
| `experts.py` | a table of mixtures of experts by the fields that they have |
| `families.py` | the fields that only some families have, by family |
| `gemma.py`, `hybrids.py`, `encoders.py` | those of Gemma, of models with states, of encoders |
| `end_tokens.py` | the tokens that end a text |
| `names.py` | tensors under the names of `transformers`, which are in `names.txt` |
| `adapter.py` | LoRA adapters |
"""
