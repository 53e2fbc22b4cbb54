"""Building and loading the compiled CPU kernels."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire_kernels import reference
from pagewire_kernels.cpu import build, native_library, tasks
from pagewire_kernels.cpu.native_library import Library, NativeStruct
from tests.support.native import native_libraries

needs_kernels = pytest.mark.skipif(
    not native_libraries(), reason="no compiled kernels for this processor"
)


@needs_kernels
def test_every_mirrored_struct_has_the_size_that_was_compiled() -> None:
    assert {struct.__name__ for struct in NativeStruct.__subclasses__()} >= {"Batch", "LinearTask"}
    for library in native_libraries():
        library.check_structs()


@needs_kernels
def test_a_struct_with_a_field_too_many_is_refused() -> None:
    code = (
        "import ctypes\n"
        "from pagewire_kernels.cpu import block_copy, layers, native_library, tasks\n"
        "class Batch(native_library.NativeStruct):\n"
        "    _fields_ = (*tasks.Batch._fields_, ('extra', ctypes.c_int64))\n"
        "native_library.library()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_env())
    size = ctypes.sizeof(tasks.Batch)
    assert f"struct Batch has {size + 8} bytes in Python, but {size} in the compiled" in run.stderr


@needs_kernels
def test_what_a_kernel_would_misread_is_refused_even_without_assertions() -> None:
    code = (
        "import torch\n"
        "from pagewire_kernels.cpu.native_library import library\n"
        "from pagewire_kernels.cpu.layers import NativeLayerKernels\n"
        "x = torch.zeros(4, 8)\n"
        "NativeLayerKernels(library()).rms_norm(x, torch.ones(7), 1e-6)\n"
    )
    run = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, env=_env()
    )
    assert "ValueError: a CPU kernel requires a dense weight of the rows' size" in run.stderr


def _env() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(reference.__file__).parents[2])}


@pytest.fixture
def own_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to build into, from one small source."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/version.cpp").write_text(
        'extern "C" const char* pw_sources() { return PAGEWIRE_SOURCES; }\n'
    )
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    return tmp_path


@pytest.mark.skipif(build.compiler() is None, reason="nothing to build the kernels with")
def test_a_flag_that_the_compiler_lacks_costs_one_instruction_set(
    own_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = build.INSTRUCTION_SETS | {"avx512_bf16": ["-march=of-the-future"]}
    monkeypatch.setattr(build, "INSTRUCTION_SETS", sets)
    cxx = build.compiler()
    assert cxx is not None
    built, failed = build.build(cxx)
    assert failed == ["avx512_bf16"]
    assert [path.stem for path in built] == [f"libpagewire_{s}" for s in ("avx2", "avx512", "amx")]
    kept = built[0].stat().st_mtime_ns
    assert build.build(cxx)[0] == built
    assert built[0].stat().st_mtime_ns == kept, "its sources are the same"
    built[0].unlink()
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {"avx2": ["-march=of-the-future"]})
    with pytest.raises(subprocess.CalledProcessError):
        build.build(cxx)


def test_missing_kernels_are_a_warning(own_build: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert native_library.library.__wrapped__() is None
    assert "compiled CPU kernels not found" in caplog.text


@needs_kernels
def test_the_next_narrower_instruction_set_is_used_where_the_widest_was_not_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sets = ["of_the_future", *native_library.instruction_sets()]
    monkeypatch.setattr(native_library, "instruction_sets", lambda: sets)
    with caplog.at_level(logging.WARNING):
        library = native_library.library.__wrapped__()
    assert isinstance(library, Library)
    assert library.instruction_set == sets[1]
    assert f"CPU kernels were not built for of_the_future, using those for {sets[1]}" in caplog.text
