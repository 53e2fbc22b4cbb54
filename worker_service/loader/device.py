"""A model's device, dtype and CPU threads, and the return of freed memory to the system.

`auto` selects the dtype in which the checkpoint was saved, with one exception: on a CPU, bfloat16
becomes float32 unless the CPU multiplies it natively (AVX512-BF16 or AMX), because it is slower if
emulated, and float16, which no CPU kernel of ours computes, always becomes float32.

glibc returns a freed allocation to the system at once only if it was larger than a threshold, and
this threshold grows with the sizes that a process frees, up to 32 MiB. After the first large
temporary, freed weights therefore stay with the process, which would double its memory while a
model is loaded. While the model runs, on the other hand, returning a step's temporaries would cost
a page fault for each of their pages.
"""

import ctypes
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from worker_service import cpu_cores
from worker_service.cpu_cores import ALL_CORES, CpuShare
from worker_service.errors import InvalidOption

logger = logging.getLogger(__name__)


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str, local_rank: int = 0, *, is_alone: bool = True) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one.

    `cuda` without an index is GPU `local_rank`. is_alone: see `gpu_number`. Raises InvalidOption if
    the name is unknown or there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidOption(f"device: expected auto, cpu or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidOption(f"device: expected auto, cpu or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidOption(f"device: expected cpu, because torch finds no GPU, got {device}")
        num_gpus = torch.cuda.device_count()
        index = gpu_number(device.index, local_rank, num_gpus, is_alone=is_alone)
        return torch.device("cuda", index)
    return torch.device("cpu")


def gpu_number(asked: int | None, local_rank: int, num_gpus: int, *, is_alone: bool) -> int:
    """Return the index of the GPU: the one that was asked for, or the one for `local_rank`.

    is_alone: whether the worker has a whole model. Several such workers may share a GPU; ranks of
    one model may not. Raises InvalidOption if there are too few GPUs.
    """
    number = local_rank if asked is None else asked
    if asked is None and is_alone:
        number %= num_gpus
    if number >= num_gpus:
        raise InvalidOption(
            f"device: expected a GPU below {num_gpus}, the number of GPUs, got cuda:{number}"
        )
    return number


def resolve_dtype(name: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; for `auto` see above. config: content of `config.json`.

    Raises InvalidOption for float16 on a CPU."""
    if name == "float16" and device.type == "cpu":
        raise InvalidOption(
            "dtype: expected auto, bfloat16 or float32 on a CPU, got float16, which is for GPUs:"
            " bfloat16 takes as much memory, float32 keeps every digit of a float16 checkpoint"
        )
    if name != "auto":
        return _DTYPES[name]
    saved = _saved_dtype(config)
    dtype = torch.float32 if device.type == "cpu" and not _native_on_cpu(saved) else saved
    logger.info("dtype chosen dtype=%s checkpoint=%s device=%s", dtype, saved, device)
    return dtype


_SMALL_MODEL = 500_000_000
"""Parameters below which rounding to bfloat16 often changes a greedy answer."""


def warn_of_rounding(
    name: str, dtype: torch.dtype, device: torch.device, num_parameters: int
) -> None:
    """Log that a small model may answer better in float32, unless the user chose the dtype.

    name: `--dtype`; dtype: what it was resolved to.
    """
    is_chosen = name != "auto" or device.type != "cpu" or dtype == torch.float32
    if not is_chosen and num_parameters < _SMALL_MODEL:
        logger.warning(
            "small models may answer worse in %s: --dtype float32 num_parameters=%d",
            str(dtype).removeprefix("torch."),
            num_parameters,
        )


def _saved_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in `config.json`, under any of the keys that `transformers` has used."""
    holders = (config, config.get("text_config") or {})
    names = [holder.get(key) for holder in holders for key in ("dtype", "torch_dtype")]
    named = (name for name in names if isinstance(name, str) and name in _DTYPES)
    return next((_DTYPES[name] for name in named), torch.float32)


def _native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether the CPU has instructions that multiply numbers of `dtype`."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return dtype == torch.float32


_PARAMETERS_PER_THREAD = 4_000_000
"""A matrix product with fewer weights ends before a second thread has started to work on it."""


def set_threads(threads: int | None, num_parameters: int, share: CpuShare = ALL_CORES) -> None:
    """Limit torch to `threads` threads; None: one per usable core, fewer for a small model.

    share: the part of the container's quota that this process may use.

    Threads synchronize after every operation. In a small model this takes longer than the
    operations, and many times longer if other processes use the same cores.
    """
    num_cores = cpu_cores.num_usable_cores(share=share)
    found = min(torch.get_num_threads(), num_cores)
    if (threads or 0) > num_cores:
        message = "more threads than cores, which wait for each other: lower --threads"
        logger.warning("%s num_threads=%d num_cores=%d", message, threads, num_cores)
    chosen = threads or max(1, min(found, num_parameters // _PARAMETERS_PER_THREAD))
    torch.set_num_threads(chosen)
    logger.info("threads chosen num_threads=%d found=%d", chosen, found)


def pin_threads(cpus: Sequence[int]) -> None:
    """Pin the calling thread and its compute threads to one CPU each, one thread per CPU.

    Call it before the thread has computed anything: its compute threads are recognized by being
    started here.
    """
    torch.set_num_threads(len(cpus))
    before = cpu_cores.thread_ids()
    torch.zeros(len(cpus) << 16).add_(1)
    team = [threading.get_native_id(), *sorted(cpu_cores.thread_ids() - before)]
    cpu_cores.pin(dict(zip(team, cpus, strict=False)))
    logger.info("threads pinned cpus=%s", list(cpus[: len(team)]))


_VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10"),
    *("log1p", "log2", "sin", "sqrt", "tan", "tanh"),
)


def initialize_vector_math() -> None:
    """Make the first calls of MKL's vector math functions from the calling thread alone.

    MKL 2024.2, which torch uses for these functions, has a race if several threads share the first
    call: in about one of a thousand processes, one thread computed its share with 12 bits of
    precision instead of 24.
    """
    for dtype in (torch.float32, torch.float64):
        for name in _VECTOR_FUNCTIONS:
            getattr(torch.ones(1, dtype=dtype), name)()


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_WHEN_LOADING = 1 << 18
_LARGE_WHEN_RUNNING = 32 << 20  # the maximum of glibc's dynamic threshold


@contextmanager
def freed_memory_returns() -> Iterator[None]:
    """Return large allocations to the system when they are freed, and all free memory at the end.

    Does nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_WHEN_LOADING)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_WHEN_RUNNING)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_WHEN_RUNNING)
        libc.malloc_trim(0)
