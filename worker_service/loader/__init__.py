"""From a model's name on the command line to a model that is ready to run.

| file | holds |
| --- | --- |
| `load.py` | `load_model`: finds the model, selects kernels, builds it, and tries it |
| | `check_model`: what can be found wrong without doing so |
| `build.py` | building a model, and filling it from its checkpoint |
| `draft_head.py` | building a draft head, and filling it from its checkpoint |
| `eagle_head.py` | an EAGLE-3 head, which is checked against its target |
| `mtp_head.py` | the head in the checkpoint of the model itself |
| `model_files.py` | a directory, the hub or the embedded model; assets for frontends; fingerprint |
| `hub_progress.py` | the progress of a download |
| `gguf_file.py` | GGUF files: metadata, and tensors one at a time, dense or packed |
| `gguf_blocks.py` | a table of the types of quantized tensors in GGUF files |
| `gguf_model.py` | configuration of a GGUF file, as that of `transformers` |
| `gguf_hybrids.py` | what only models with states have in it |
| `gguf_gemma4.py` | what only Gemma 3n and 4 have in it |
| `gguf_metadata.py` | typed access to the metadata of a GGUF file |
| `gguf_names.py` | tensors of a GGUF file under the names of `transformers` |
| `adapters.py` | LoRA adapters of a loaded model, in folders and files |
| `gguf_adapter.py` | LoRA adapters in GGUF files |
| `quantized_checkpoint.py` | `quantization_config`, and quantized weights under dense names |
| `quantized_formats.py` | a table of the tensors that make up a quantized weight |
| `rounded_cache.py` | an on-disk cache of weights quantized by `--quantization` |
| `tensors.py` | the tensors of a checkpoint, whatever they are stored as |
| `weights.py` | reading weights, packing them while loading, scales of an fp8 KV cache |
| `device.py` | device, dtype, threads, and returning freed host memory to the system |
| `pooling.py` | whether and how a model pools, by its configuration, files and options |
| `sentence_transformers.py` | the files of sentence-transformers |
| `trial.py` | a trial run that checks results and batch invariance |
"""

from worker_service.loader.eagle_head import load_eagle_head
from worker_service.loader.load import LoadedModel, check_model, load_draft_model, load_model
from worker_service.loader.mtp_head import load_mtp_head

__all__ = [
    "LoadedModel",
    "check_model",
    "load_draft_model",
    "load_eagle_head",
    "load_model",
    "load_mtp_head",
]
