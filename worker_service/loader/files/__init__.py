"""The files of a model.

| file | holds |
| --- | --- |
| `hub_progress.py` | the progress of a download |
| `places.py` | where they are: a directory, the hub or the embedded model |
| `gguf_on_hub.py` | which of the hub's GGUF files a model's name means |
| `json_files.py` | reading JSON |
| `config.py` | configuration, and the tokens that begin and end sequences |
| `overrides.py` | what options replace in them |
| `assets.py` | the files that frontends need |
| `fingerprint.py` | a hash of what results depend on |
"""
