"""A checkpoint that several modules change copies of."""

from pathlib import Path

import pytest

from tests.support.quantized_checkpoints import FORMATS
from tests.support.quantized_files import make_quantized


@pytest.fixture(scope="module")
def gptq_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings, quantize = FORMATS["gptq 4"]
    return make_quantized(tmp_path_factory.mktemp("gptq"), settings, quantize)[0]
