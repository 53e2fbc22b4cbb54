"""Builds the C++ kernels with the package, where there is a compiler for them."""

import importlib.util
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "kernels/pagewire_kernels/cpu"


class NativeKernelsHook(BuildHookInterface):
    """Without a compiler the package is complete, too: slower kernels do the work."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one for this platform."""
        if self.target_name != "wheel":
            return
        build = _load_build()
        cxx = build.compiler()
        if cxx is None:
            self.app.display_warning("no C++ compiler found: torch replaces the CPU kernels")
            return
        try:
            libraries, failed = build.build(cxx)
        except CalledProcessError as error:
            self.app.display_warning(f"no CPU kernels were built, torch replaces them: {error}")
            return
        if failed:
            self.app.display_warning(f"{cxx} cannot build CPU kernels for {', '.join(failed)}")
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in libraries]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{build.MACHINE}"


def _load_build() -> ModuleType:
    """The build script by its path: the package around it needs torch."""
    spec = importlib.util.spec_from_file_location("pagewire_native_build", NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
