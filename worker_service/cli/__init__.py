"""The flags of `python -m worker_service`, and the settings that their values make.

| file | holds |
| --- | --- |
| `flags.py` | the flags, mostly fields of the configuration's dataclasses, and the configuration |
| `ranks.py` | flags of ranks, and which rank a process is |
"""
