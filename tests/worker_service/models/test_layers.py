"""Shared layers: correct, and batch-invariant to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire_kernels.cpu.native_library import library
from pagewire_kernels.reference.backend import LayerKernels
from worker_service.models.interface import ModelContext
from worker_service.models.linear.vocabulary import VocabEmbedding, VocabHead
from worker_service.models.transformers_backend.model import InvariantOps

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_and_its_embedding_share_one_table(dtype: torch.dtype) -> None:
    context = ModelContext(dtype=dtype, device=CPU)
    embedding = VocabEmbedding(80, 48, context, LayerKernels())
    assert embedding.weight is not None
    table = embedding.weight.copy_(torch.randn(80, 48)).clone()
    head = VocabHead(80, 48, context, tied_to=embedding)
    head.pack()
    ids = torch.tensor([3, 79, 0, 3])
    assert torch.equal(embedding(ids), table[ids])
    assert (embedding.weight is None) == (library() is not None)
    hidden = torch.randn(4, 48).to(dtype)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    expected = hidden.float() @ table.float().t()
    torch.testing.assert_close(logits, expected.to(dtype).float(), atol=0.05, rtol=0.02)


def test_functions_that_a_library_calls_are_replaced_within_the_mode() -> None:
    weight = torch.nn.Parameter(torch.randn(48, 64))
    x = torch.randn(33, 64)

    def compute(rows: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(rows, weight)
        hidden = torch.nn.functional.silu(hidden) * torch.sigmoid(hidden) + hidden.sigmoid()
        return torch.nn.functional.gelu(hidden, approximate="tanh")

    with torch.inference_mode(), InvariantOps("cpu"):
        expected = compute(x)
        rows = [compute(row[None]) for row in x]
    assert torch.equal(torch.cat(rows), expected)
    torch.testing.assert_close(compute(x), expected, atol=1e-4, rtol=1e-4)


class _Dtypes(TorchDispatchMode):
    """The types of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seen.append(result.dtype)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_not_rounded_to_the_type_of_the_weights(dtype: torch.dtype) -> None:
    """On the device without data: torch has this product for GPUs and none for CPUs."""
    head = VocabHead(1000, 64, ModelContext(dtype=dtype, device=torch.device("meta")), None)
    rows = torch.empty(3, 64, dtype=dtype, device="meta")
    with _Dtypes() as dtypes:
        logits = head(rows)
    assert dtypes.seen == [torch.float32]
    assert logits.shape == (3, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_on_a_gpu_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 1024, generator=draw).to(dtype)
    weight = (torch.randn(4000, 1024, generator=draw) / 32).to(dtype)
    head = VocabHead(4000, 1024, ModelContext(dtype=dtype, device=torch.device("cuda")), None)
    assert head.weight is not None
    head.weight.copy_(weight)
    torch.testing.assert_close(
        head(rows.cuda()).cpu(), rows.float() @ weight.float().T, atol=1e-4, rtol=1e-4
    )
