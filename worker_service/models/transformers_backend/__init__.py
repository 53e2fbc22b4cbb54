"""Every decoder-only model of `transformers`, with its attention replaced by ours.

`transformers` lets one register an attention function by name. Models then run as the library wrote
them, on one flattened sequence of all rows with their own positions, and where they would attend
they store keys and values in our cache and attend over it.

    refusals.py        what this cannot carry, told by name before weights are loaded
    attention.py       the function that is registered, and the record of a trial run
    build.py           loading
    model.py           the `Model` that comes of it
    cache_spec.py      from the trial run to the cache's shape
    packing.py         linear layers and experts in the CPU's own layout
    invariant_ops.py   on CPUs: functions whose results do not depend on the batch
"""

from worker_service.models.transformers_backend.build import build_transformers_model

__all__ = ["build_transformers_model"]
