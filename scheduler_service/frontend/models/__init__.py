"""The models that can be used: what a frontend reads from their files.

| module | holds |
| --- | --- |
| `served_models` | the models by name |
| `model_loader` | models made of their files, which a worker sends |
| `frontend_model` | a model's facts, and what is read from its files |
| `generation_defaults` | its own values of absent sampling parameters |
| `adapters` | the adapters by name, as the core announces them |
| `tokenizer`, `chat_template` | a model's tokenizer and its chat template |
| `tokenizer_files` | where a checkpoint's files name special tokens and chat templates |
| `message_forms` | the form in which a chat template takes messages |
"""
