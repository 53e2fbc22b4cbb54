"""Checkpoints of known shapes with random weights and a working tokenizer.

    python -m benchmarks.models.checkpoints --shape llama-160m --dtype bfloat16 FOLDER

Writes `FOLDER/llama-160m-bfloat16`, unless it exists. Weights are drawn tensor by tensor, each from
a generator seeded with its name, so that a shape is the same model in every dtype, up to rounding.
With `--gguf`, the same weights are also written for llama.cpp. The weights of a shape with
`weights` are quantized and stored in that format, layer by layer.
"""

import argparse
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from benchmarks.models.gguf_file import write_gguf
from benchmarks.models.model_shapes import BYTES_PER_VALUE, SHAPES, Shape
from benchmarks.models.quantized_layers import CONFIGS, quantized
from benchmarks.models.synthetic_tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, write_tokenizer

WEIGHT_SCALE = 0.02
"""Standard deviation of matrices, that of common initializations."""

OFFSETS = ("bias", "sinks")
"""Ends of the names of vectors that are added, and so are small."""

MAX_SHARD_BYTES = 2 * 2**30


def checkpoint(shape: Shape, dtype: str, folder: Path) -> Path:
    """Return the checkpoint's directory in `folder`, creating it if necessary."""
    path = folder / f"{shape.name}-{dtype}"
    if (path / "config.json").exists():
        return path
    # An interrupted write leaves a directory of another name.
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = dict(_weights(shape, getattr(torch, dtype)))
    save_torch_state_dict(weights, partial, max_shard_size=MAX_SHARD_BYTES)
    write_tokenizer(partial, shape.vocab_size, shape.max_position_embeddings)
    (partial / "config.json").write_text(json.dumps(config_of(shape, dtype), indent=2) + "\n")
    partial.rename(path)
    return path


def gguf(shape: Shape, dtype: str, folder: Path) -> Path:
    """Return the same checkpoint as a GGUF file for llama.cpp, creating it if necessary."""
    source = checkpoint(shape, dtype, folder)
    path = source.with_suffix(source.suffix + ".gguf")
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        write_gguf(shape, source, partial)
        partial.rename(path)
    return path


def config_of(shape: Shape, dtype: str) -> dict[str, Any]:
    """The content of a shape's `config.json`."""
    config = _transformers_config(shape).to_dict()
    config.pop("transformers_version", None)
    architectures = [_skeleton(shape).__class__.__name__]
    config |= {"architectures": architectures, "dtype": dtype, "torch_dtype": dtype}
    if shape.weights is not None:
        config["quantization_config"] = CONFIGS[shape.weights]
    return config


def _transformers_config(shape: Shape) -> object:
    from transformers import AutoConfig

    special = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID}
    return AutoConfig.for_model(shape.model_type, **special, **shape.config())


def _skeleton(shape: Shape) -> torch.nn.Module:
    """Build the model on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(_transformers_config(shape))
    return model


def _weights(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values. As many tensors are drawn at a time as there are cores."""
    described = [
        (name, empty.shape)
        for name, empty in _skeleton(shape).state_dict().items()
        if not (shape.tied and name == "lm_head.weight")
    ]
    num_threads = len(os.sched_getaffinity(0))
    drawn: deque[Future[list[tuple[str, Tensor]]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for name, size in described:
            drawn.append(pool.submit(_drawn, shape, dtype, name, size))
            if len(drawn) == num_threads:
                yield from drawn.popleft().result()
        for last in drawn:
            yield from last.result()


def _drawn(
    shape: Shape, dtype: torch.dtype, name: str, size: torch.Size
) -> list[tuple[str, Tensor]]:
    """Draw a tensor; of a matrix that is quantized, return all parts."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(size, generator=generator) * WEIGHT_SCALE
    if shape.weights is not None and name.endswith("_proj.weight"):
        parts = quantized(values, shape.weights).items()
        return [(name.removesuffix("weight") + end, part.contiguous()) for end, part in parts]
    # Norms scale around one, for which Gemma stores zero, and matrices around zero.
    if len(size) == 1 and "gemma" not in shape.model_type and not name.endswith(OFFSETS):
        values += 1
    values = values.to(dtype)
    if not _is_stored_apart(shape, name, size):
        return [(name, values)]
    prefix, _, part = name.rpartition(".")
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    return [
        (f"{prefix}.{expert}.{stored}.weight", part.clone())
        for expert, stacked in enumerate(values)
        for stored, part in zip(names, stacked.chunk(len(names)), strict=True)
    ]


def _is_stored_apart(shape: Shape, name: str, size: torch.Size) -> bool:
    """Whether a stack of experts has a tensor for each of them in checkpoints."""
    is_stack = len(size) == 3 and not name.endswith(("conv.weight", "conv1d.weight"))
    return is_stack and shape.model_type != "gpt_oss"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make checkpoints and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where they are kept")
    parser.add_argument("--shape", nargs="+", default=["llama-160m"], choices=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(BYTES_PER_VALUE))
    parser.add_argument("--gguf", action="store_true", help="for llama.cpp as well")
    args = parser.parse_args(arguments)
    make = gguf if args.gguf else checkpoint
    for name in args.shape:
        for dtype in args.dtype:
            print(make(SHAPES[name], dtype, args.folder))


if __name__ == "__main__":
    main()
