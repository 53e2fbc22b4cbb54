"""The flags of `python -m worker_service`, one dataclass per concern, and the settings they make.

The fields of a dataclass are the flags: their names, types, defaults and help. `takes_flags` in
`options.py` gives the command all their fields as parameters, and calls it with the dataclasses.

| file | holds |
| --- | --- |
| `options.py` | commands whose parameters are the fields of dataclasses |
| `model_flags.py` | flags of the model, its KV cache and the device, and of the simulated worker |
| `ranks.py` | flags of ranks, and which rank a process is |
| `service_flags.py` | flags of the process: name, addresses, shutdown, logs, TLS and cluster key |
"""
