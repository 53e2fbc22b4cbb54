"""Makes the small Llama-architecture model that is shipped with Pagewire.

`corpus` writes the training text from a seed, out of `arithmetic`, `lessons` and
`stories`; `tokenizer` learns a byte-level BPE from it; `packing` turns documents into
windows of token ids; `train` fits the model and writes the artefacts; `evaluate`
asks the stored model questions whose answers are known.
"""
