"""Speeds of attention backends on a device, measured at the first start and cached in a file.

Which backend is fastest depends on the GPU, on the versions of packages and on the heads of the
model. Measuring takes a few seconds, so the results are cached for each combination, as JSON, in
`~/.cache/pagewire/attention_speed.json` (or below `XDG_CACHE_HOME`).
"""

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, HostLengths
from pagewire_kernels.interface import AttentionBackend, AttentionNeeds

logger = logging.getLogger(__name__)

Operation = Callable[[], object]

Measure = Callable[[AttentionBackend, torch.device, AttentionNeeds], float]
"""Measures the seconds that a backend takes for the attention of some steps."""

_CALLS_PER_GRAPH = 10

_EAGER_LAYERS = 32
_EAGER_LAUNCHES = 10
"""Operations beside attention in a layer, such as norms and products: in an eager step, the host
queues them for every layer."""

_CLEARLY_FASTER = 0.95
"""Share of another backend's time below which the difference exceeds errors of measurement."""

_PACKAGES = (
    "torch",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "vllm",
    "vllm-flash-attn",
    "flashinfer-python",
    "pagewire",
)
"""Packages on whose versions speeds depend."""


def median_seconds(
    operation: Operation, device: torch.device, *, repeats: int, capture: bool = True
) -> float:
    """Return the seconds of one call without the time to launch it: the median of `repeats`
    measurements.

    On a GPU, a measurement is the replay of a CUDA graph of ten calls between two events; without
    `capture`, for operations that cannot be captured, it is one call between two events.
    """
    for _ in range(2):
        operation()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(operation) for _ in range(repeats))
    torch.cuda.synchronize(device)
    if not capture:
        return statistics.median(_event_seconds(operation) for _ in range(repeats))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            operation()
    graph.replay()
    return statistics.median(_event_seconds(graph.replay) for _ in range(repeats)) / (
        _CALLS_PER_GRAPH
    )


def _wall_seconds(operation: Operation) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def _event_seconds(operation: Operation) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    operation()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def attention_seconds(
    backend: AttentionBackend,
    device: torch.device,
    needs: AttentionNeeds,
    *,
    num_decodes: int = 64,
    context: int = 1024,
    chunk: int = 512,
    repeats: int = 9,
) -> float:
    """Return the seconds of a layer's attention in two steps: of decodes, and of decodes and a
    chunk of a prompt. All have the same context length, in randomly ordered blocks.

    Both are replayed from CUDA graphs, as steps are. If the backend's mixed batches cannot be
    captured, the second is the time of an eager layer: the plan of the batch is part of it, and the
    host may take longer than the device.
    """
    block_size = needs.block_size or backend.abilities.default_block_size
    blocks_per_seq = -(-context // block_size)
    num_blocks = (num_decodes + 1) * blocks_per_seq
    shape = (num_blocks, 2, block_size, needs.num_kv_heads, needs.head_dim)
    cache = torch.zeros(shape, dtype=needs.cache_dtype or needs.dtype, device=device)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order.int().view(num_decodes + 1, blocks_per_seq).to(device)
    seconds = 0.0
    for query_lens in ([1] * num_decodes, [*[1] * num_decodes, chunk]):
        num_seqs, num_tokens = len(query_lens), sum(query_lens)
        rows = num_tokens, needs.num_heads, needs.head_dim
        query = torch.zeros(rows, dtype=needs.dtype, device=device)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lengths = torch.full((num_seqs,), context, dtype=torch.int32)
        metadata = AttentionMetadata(
            query_start=starts.to(device),
            context_lens=lengths.to(device),
            block_tables=tables[:num_seqs],
            slot_mapping=torch.full((num_tokens,), -1, device=device),
            max_query_len=max(query_lens),
            max_context_len=context,
            num_decodes=num_decodes,
            host_lengths=HostLengths(starts, lengths),
        )
        attend = partial(_attend, backend, needs, query, cache)
        if num_seqs == num_decodes or backend.abilities.mixed_graphs:
            seconds += median_seconds(partial(attend, metadata), device, repeats=repeats)
        else:
            eager = partial(_eager_step, attend, metadata)
            seconds += median_seconds(eager, device, repeats=repeats, capture=False) / _EAGER_LAYERS
    return seconds


def _attend(
    backend: AttentionBackend,
    needs: AttentionNeeds,
    query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
) -> None:
    backend.paged_attention(
        query,
        cache[:, 0],
        cache[:, 1],
        metadata,
        scale=needs.head_dim**-0.5,
        sliding_window=metadata.max_context_len if needs.sliding_window else None,
        soft_cap=30.0 if needs.soft_cap else None,
    )


def _eager_step(attend: Callable[[AttentionMetadata], None], metadata: AttentionMetadata) -> None:
    """Queue the attention of all layers of a step, and as many other operations as they have."""
    step = replace(metadata)  # the batch of a new step, which is planned again
    others = step.context_lens.float()
    for _ in range(_EAGER_LAYERS):
        attend(step)
        for _ in range(_EAGER_LAUNCHES):
            others.add_(1.0)


def default_file() -> Path:
    """The file in which speeds are cached."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / (
        "pagewire/attention_speed.json"
    )


def measured_seconds(
    backends: Mapping[str, AttentionBackend],
    device: torch.device,
    needs: AttentionNeeds,
    file: Path,
    measure: Measure = attention_seconds,
) -> dict[str, float]:
    """Return the seconds of each backend by name, from the file, or measured now and written to it.

    A backend that cannot be measured is left out, with a warning; a file that cannot be read is
    ignored, with a warning.
    """
    shape = _shape_of(device, needs)
    table = _read(file)
    known = {name: table.get(shape, {}).get(name) for name in backends}
    seconds = {name: number for name, number in known.items() if number is not None}
    missing = [name for name in backends if name not in seconds]
    for name in missing:
        try:
            seconds[name] = measure(backends[name], device, needs)
        except Exception as error:  # compilers, drivers and packages raise anything
            logger.warning("attention backend not measured name=%s error=%s", name, error)
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the measurements' caches
    if any(name in seconds for name in missing):
        _write(file, table | {shape: table.get(shape, {}) | seconds})
    return seconds


def _shape_of(device: torch.device, needs: AttentionNeeds) -> str:
    """A key of everything on which speeds depend: device, packages, and the model's heads and
    features."""
    has_device = device.type == "cuda" and torch.cuda.is_available()
    found = [torch.cuda.get_device_name(device) if has_device else device.type]
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return f"{', '.join(found)}, {needs}"


def _read(file: Path) -> dict[str, dict[str, float]]:
    """The content of the file; empty if there is none, or if it is invalid."""
    try:
        content: Any = json.loads(file.read_text())
        return {
            str(shape): {str(name): float(number) for name, number in speeds.items()}
            for shape, speeds in content.items()
        }
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("speeds of attention are measured again, for %s: %s", file, error)
        return {}


def _write(file: Path, table: Mapping[str, Mapping[str, float]]) -> None:
    """Replace the file atomically: other workers may read or replace it at the same time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as target:
            json.dump(table, target, indent=2)
        Path(target.name).replace(file)
    except OSError as error:
        logger.warning("speeds of attention are not kept file=%s error=%s", file, error)


def fastest(names: Sequence[str], seconds: Mapping[str, float]) -> str:
    """Return the fastest of these; the first of them, unless a later one is clearly faster."""
    best = names[0]
    for name in names[1:]:
        if seconds.get(name, float("inf")) < _CLEARLY_FASTER * seconds.get(best, float("inf")):
            best = name
    return best
