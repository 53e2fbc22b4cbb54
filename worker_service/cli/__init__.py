"""The flags of `python -m worker_service`, one dataclass per concern, and the settings they make.

The fields of a dataclass are the flags: their names, types, defaults and help. `takes_flags` in
`options.py` gives the command all their fields as parameters, and calls it with the dataclasses.
"""
