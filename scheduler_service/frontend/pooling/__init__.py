"""Vectors, scores, ranks and labels of texts: calls that stream many inputs.

| module | holds |
| --- | --- |
| `service` | the calls as gRPC and HTTP make them |
| `call` | one call: its open inputs, its texts at the core, its results |
| `work` | what a call wants, resolved against its model |
| `inputs` | tokenization of texts and pairs, many at once |
| `scores` | similarities of vectors, probabilities of labels |
"""
