"""Adapters: small changes of a model's weights that some sequences of a batch have.

An adapter is its content: it is identified by the SHA-256 digest of that, and names are the core's
affair. `store.py` holds the adapters of a worker on the host; `peft_format.py` reads those of LoRA
and of prompts, which `models/adapters.py` applies.
"""
