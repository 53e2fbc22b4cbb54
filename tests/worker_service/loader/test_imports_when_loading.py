"""A native model is loaded without the packages that take seconds to import and are not needed."""

import json
import subprocess
import sys

import pytest

from pagewire_kernels.cpu import library

HEAVY = ["transformers", "huggingface_hub", "gguf", "torch._dynamo", "sympy"]
LOAD = """
import json, sys
from worker_service.runner import torch_executor
from worker_service.config import ModelConfig
from worker_service.loader import load_model
load_model(ModelConfig(model="embedded", device="cpu", dtype="float32"))
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.mark.skipif(library() is None, reason="no native kernels for this processor")
def test_a_native_model_on_native_kernels_takes_torch_and_little_else() -> None:
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", LOAD.format(heavy=HEAVY)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []
