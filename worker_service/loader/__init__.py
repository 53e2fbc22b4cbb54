"""From a name on the command line to a model ready to run.

load.py          `load_model`: find, choose kernels, build, fill, try
eagle_head.py    a draft head, checked against its target
model_files.py   a directory, the hub or the embedded model; assets for frontends; fingerprint
gguf_file.py     GGUF files: metadata, and tensors one at a time, dense or packed
gguf_model.py    their configuration and tensors as `transformers` names them
gguf_tokenizer.py  their tokenizer and chat template as files for frontends
quantized_checkpoint.py  `quantization_config`, and quantized weights under dense names
quantized_formats.py  the tensors that make up a quantized weight, format by format
rounded_cache.py  weights that `--quantization` has rounded, on disk
weights.py       reading weights, packing while loading, scales of an fp8 KV cache
device.py        device, dtype, threads, and returning freed host memory
trial.py         a first run that checks batch invariance
"""

from worker_service.loader.eagle_head import load_eagle_head
from worker_service.loader.load import LoadedModel, load_draft_model, load_model

__all__ = ["LoadedModel", "load_draft_model", "load_eagle_head", "load_model"]
