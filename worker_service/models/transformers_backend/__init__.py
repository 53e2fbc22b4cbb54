"""Every decoder-only model of `transformers`, with its attention replaced.

`transformers` lets one register an attention function by name. Models then run as the library wrote
them, on one flattened sequence of all rows with their own positions; where they would attend they
store keys and values in our cache and attend over it.

    build.py             loading; features that cannot be supported are refused by name
    model.py             the registered attention function, batch-invariant functions, and the
                         resulting `Model`, with its KV cache's shape from a trial run
    packed.py            layers over packed weights, filled while the model is loaded
"""

from worker_service.models.transformers_backend.build import build_transformers_model

__all__ = ["build_transformers_model"]
