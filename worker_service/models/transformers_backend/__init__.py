"""Every decoder-only model of `transformers`, with its attention replaced.

`transformers` supports registering an attention function by name. Models run unchanged, on one
flattened sequence of all rows with their own positions; the registered function writes keys and
values to the paged cache and attends over it.

    build.py             loading; models with unsupported features are refused
    model.py             the registered attention function, batch-invariant functions, and the
                         resulting `Model`, with its KV cache's shape from a trial run
    packed.py            layers over packed weights, filled while the model is loaded
    plain_linear.py      what adapters add to linear layers that torch computes, as on GPUs
"""

from worker_service.models.transformers_backend.build import build_transformers_model

__all__ = ["build_transformers_model"]
