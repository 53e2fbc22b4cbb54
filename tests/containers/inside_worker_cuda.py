"""Run by the Python of the image `worker-cuda`, without a GPU: what its first start on one needs.

Prints a JSON object.
"""

import ctypes
import inspect
import json
import re
import subprocess
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

from pagewire_kernels.flash_attention import import_vllm_flash_attn, vllm_calls
from pagewire_kernels.triton.layers import _norm

STUB = Path("/tmp/stub/libcuda.so.1")
"""Stands in for the driver's library, which the container runtime adds where there is a GPU."""


def load_stub() -> None:
    """Load a library with the functions that the launcher and FlashAttention call."""
    source = (Path(driver.dirname) / "driver.c").read_text()
    names = {*re.findall(r"\bcu[A-Z]\w+(?=\()", source), "cuTensorMapEncodeTiled"}
    STUB.parent.mkdir()
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
    command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(STUB)]
    subprocess.run([*command, "-x", "c", "-"], input=code, text=True, check=True)
    ctypes.CDLL(str(STUB), ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = str(STUB.parent)


def compiled_kernel() -> bytes:
    """One of our kernels as machine code for compute capability 9.0."""
    constants = {"SIZE": 64, "HAS_RESIDUAL": True, "HAS_WEIGHT": True, "IS_RMS": True, "TILE": 64}
    tensors = dict.fromkeys(("output", "x", "residual", "weight", "bias"), "*bf16")
    kinds = tensors | {"eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in _norm.arg_names}
    source = ASTSource(fn=_norm, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code: bytes = found.asm["cubin"]
    return code


def main() -> None:
    """Print what was found."""
    load_stub()
    launcher = driver.CudaUtils()
    flash = import_vllm_flash_attn()
    assert flash is not None
    found = {
        "kernel": len(compiled_kernel()),
        "launcher": [name for name in ("launch", "load_binary") if hasattr(launcher, name)],
        "torch of vLLM": [
            requirement
            for requirement in requires("vllm") or []
            if requirement.startswith("torch=")
        ],
        "has vLLM": find_spec("vllm.engine") is not None,
        "parameters": [*inspect.signature(flash.flash_attn_varlen_func).parameters],
        "versions": [call.version for call in vllm_calls(flash, is_hopper=True)],
        "torch": torch.__version__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
