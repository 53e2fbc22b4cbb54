"""Whether and how a model pools.

| file | holds |
| --- | --- |
| `sentence_transformers.py` | the files of sentence-transformers |
| `pooler.py` | what follows the pooling, by the configuration, files and options of a model |
"""
