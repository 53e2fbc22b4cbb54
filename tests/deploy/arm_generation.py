"""Generates with the embedded model in one process, and prints the machine, the kernels and the
tokens: run by the emulated Python of another processor, and by this one's."""

import json
import platform
from pathlib import Path

import torch

from pagewire_kernels.cpu import native_library
from tests.support.in_process import InProcessEngine

torch.set_num_threads(1)
library = native_library.library()
engine = InProcessEngine(Path("embedded"), block_size=64, num_gpu_blocks=64)
tokens = [
    [output.token_ids for output in engine.generate([[1, 20, 30, 40], [1, 50, 60]], 24, **sampling)]
    for sampling in ({}, {"temperature": 0.9, "seed": 7})
]
kernels = None if library is None else library.instruction_set
print(json.dumps({"machine": platform.machine(), "kernels": kernels, "tokens": tokens}))
