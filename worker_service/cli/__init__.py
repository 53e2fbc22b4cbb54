"""The flags of `python -m worker_service`, one record per concern, and the settings they make.

A record's fields are the flags: their names, types, defaults and help. `signature.py` gives the
command all their fields as its parameters, and calls it with the records.
"""
