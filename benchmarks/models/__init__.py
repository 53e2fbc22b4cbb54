"""Models whose weights are random, as checkpoints that engines load.

| module | makes |
| --- | --- |
| `checkpoints` | checkpoints of the shapes; a script, too |
| `model_shapes` | the shapes by name, of `model_shapes.toml` |
| `quantized_layers` | weights in the formats of quantized checkpoints |
| `gguf_file` | the same weights for llama.cpp, and adapters |
| `synthetic_tokenizer` | a tokenizer of any number of tokens |
| `draft_heads` | heads that draft |
| `encoder` | an encoder of all-MiniLM-L6-v2's shape |
"""
