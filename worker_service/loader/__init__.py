"""From a model's name on the command line to a model that is ready to run.

Modules and folders form layers: each imports only those above it.

| part | holds |
| --- | --- |
| `tensors.py` | the tensors of a checkpoint, whatever they are stored as |
| `device.py` | device, dtype, threads, and returning freed host memory to the system |
| `gguf/` | GGUF files: tensors, configuration, adapters |
| `files/` | the files of a model, wherever they are; assets for frontends; fingerprint |
| `quantized/` | quantized checkpoints under dense names |
| `weights/` | the checkpoint of a model, and filling a model from it |
| `pooling/` | whether and how a model pools, by its configuration, files and options |
| `kernels.py` | the kernels of a model, selected by what its attention needs |
| `build.py` | building a model, and filling it from its checkpoint |
| `trial.py` | a trial run that checks results and batch invariance |
| `loaded_model.py` | the model, its cache groups, and the identity of its arithmetic |
| `texts.py` | what frontends need, read while weights are loaded |
| `load.py` | `load_model`: finds the model, selects kernels, builds it, and tries it |
| | `check_model`: what can be found wrong without doing so |
| `adapters.py` | LoRA adapters of a loaded model, in folders and files |
| `drafts/` | what drafts tokens for a loaded model |
"""

from worker_service.loader.drafts.draft_model import load_draft_model
from worker_service.loader.drafts.eagle_head import load_eagle_head
from worker_service.loader.drafts.mtp_head import load_mtp_head
from worker_service.loader.load import check_model, load_model
from worker_service.loader.loaded_model import LoadedModel

__all__ = [
    "LoadedModel",
    "check_model",
    "load_draft_model",
    "load_eagle_head",
    "load_model",
    "load_mtp_head",
]
