"""Models that compute with these kernels alone, against the reference and against themselves."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from pagewire_kernels.reference.backend import ReferenceBackend, TorchLayerKernels
from pagewire_kernels.select import Kernels
from pagewire_kernels.triton import TritonBackend, TritonLayerKernels
from tests.support.checkpoints import checkpoint
from tests.support.gpu_kernels import DEVICE, MARKS
from tests.support.paged_driver import PagedDriver
from worker_service.loader.model_files import read_config
from worker_service.loader.weights import load_weights, open_checkpoint
from worker_service.models.interface import ModelContext
from worker_service.models.linear import Linear
from worker_service.models.native import NativeModel
from worker_service.models.registry import build_native_model

pytestmark = MARKS

OURS = Kernels(TritonBackend(batch_invariant=True), TritonLayerKernels())
PLAIN = Kernels(ReferenceBackend(), TorchLayerKernels())


def _model(family: str, kernels: Kernels) -> NativeModel:
    folder = checkpoint(family)
    place = ModelContext(dtype=torch.float32, device=DEVICE, batch_invariant=True)
    model = build_native_model(read_config(folder), None, place, kernels)
    assert model is not None
    load_weights(model, open_checkpoint(folder), show_progress=False)
    if kernels is OURS:
        for module in model.modules():
            if isinstance(module, Linear):
                module.fix_order()
    return model


def _driver(model: NativeModel) -> PagedDriver:
    return PagedDriver(model, device=str(DEVICE))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt"])
def test_a_sequence_has_the_references_logits_and_the_same_bits_in_any_batch(family: str) -> None:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(5, 250, size=length).tolist() for length in (5, 21, 1)]
    batch = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    model = _model(family, OURS)
    together = _driver(model).run(batch)
    for found, expected in zip(together, _driver(_model(family, PLAIN)).run(batch), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    driver, prompt = _driver(model), prompts[1]
    pieces = [driver.run([(0, a, prompt[a:b])])[0] for a, b in pairwise((0, 13, 20, 21))]
    assert torch.equal(torch.cat(pieces), together[1])
