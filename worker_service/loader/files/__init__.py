"""The files of a model.

| file | holds |
| --- | --- |
| `hub_progress.py` | the progress of a download |
| `model_files.py` | a directory, the hub or the embedded model; assets for frontends; fingerprint |
"""
