"""Machine code of the kernels: compiled when first needed, kept on disk by numba.

One entry per kernel and cache dtype, a C function that takes the address of the kernel's array of
int64. If numba cannot cache on disk, every process compiles again.
"""

import ctypes
import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch

from pagewire_kernels.cpu.numba import attention, cache_write, simd

logger = logging.getLogger(__name__)

_SIGNATURE = numba.void(numba.types.CPointer(numba.int64))


class Kernel:
    """A compiled entry: callable with an address, and known by its own."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # owns the machine code
        self.address: int = compiled.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


@cache
def attention_kernel(dtype: torch.dtype) -> Kernel:
    """The attention kernel for a cache of `dtype`."""
    return _compile(_attention_entry(dtype, _sources()), f"attention dtype={dtype}")


@cache
def write_kv_kernel() -> Kernel:
    """The kernel that stores keys and values, for any dtype."""
    return _compile(_write_kv_entry(_sources()), "write_kv")


# An entry refers to the sources' digest, which makes that part of the key under which numba keeps
# the code: by itself numba would notice changes in this file only.


def _attention_entry(dtype: torch.dtype, sources: str) -> Callable[[Any], None]:
    def float32(task: Any) -> None:
        if sources:
            attention.attend(task, simd.float32())

    def bfloat16(task: Any) -> None:
        if sources:
            attention.attend(task, simd.bfloat16())

    def float16(task: Any) -> None:
        if sources:
            attention.attend(task, simd.float16())

    return {torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: float16}[dtype]


def _write_kv_entry(sources: str) -> Callable[[Any], None]:
    def write_kv(task: Any) -> None:
        if sources:
            cache_write.write_kv(task)

    return write_kv


def _sources() -> str:
    """A digest of all that the entries are compiled from."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _compile(entry: Callable[[Any], None], name: str) -> Kernel:
    started = time.perf_counter()
    try:
        compiled = numba.cfunc(_SIGNATURE, cache=True)(entry)
    except RuntimeError as error:  # numba finds no directory that it can write to
        logger.warning("kernels are compiled again in each process: %s", error)
        compiled = numba.cfunc(_SIGNATURE)(entry)
    seconds = time.perf_counter() - started
    source = "disk" if compiled.cache_hits else "compiler"
    logger.info("kernel ready name=%s seconds=%.2f source=%s", name, seconds, source)
    return Kernel(compiled)
