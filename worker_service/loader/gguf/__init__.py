"""GGUF files, as a model of `transformers` with a checkpoint. Headers and the tokenizer are read
without torch, in `worker_service/gguf/`.

| file | holds |
| --- | --- |
| `blocks.py` | a table of the types of quantized tensors |
| `file.py` | metadata, and tensors one at a time, dense or packed |
| `metadata.py` | typed access to the metadata |
| `hybrids.py` | the configuration of models with states |
| `gemma4.py` | the configuration of Gemma 3n and 4 |
| `config.py` | the configuration, as that of `transformers`; classes are in `classes.txt` |
| `names.py` | tensors under the names of `transformers`, which are in `names.txt` |
| `adapter.py` | LoRA adapters |
"""
