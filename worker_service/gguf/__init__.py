"""What is read of GGUF files without torch: headers, and the tokenizer.

A worker makes the tokenizer's files of a large vocabulary in a process of its own, which takes a
second of Python, while it imports torch and loads weights itself. Tensors and the configuration are
in `loader`.

| file | holds |
| --- | --- |
| `header.py` | metadata, and where tensors are |
| `tokenizer.py` | tokenizer and chat template, as files for frontends |
| `tokenizer_process.py` | the process that makes these files |
| `__main__.py` | what that process does |
"""
