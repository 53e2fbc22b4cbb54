"""Packs the packages that a GPU machine without network lacks.

    python -m tools.gpu_payload --output build/gpu-packages.tar.xz

Such a machine has Python 3.12, torch, Triton and transformers with their dependencies. All other
requirements of client, scheduler and worker are installed into an archive, which `make gpu-day`
unpacks. Needs pip and network.
"""

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = {"grpcio": "1.84.0", "protobuf": "7.36.2"}
"""Versions of packages of the machine, with which others must be compatible."""
PROVIDED = {
    *PINNED,
    *("aiohttp", "hf-xet", "huggingface-hub", "numpy", "pytest", "safetensors", "tokenizers"),
    *("torch", "transformers", "triton", "uvloop"),
}
"""Packages that the machine has, which are not packed."""
BENCHMARKS = ("psutil", "pytest-asyncio", "pytest-timeout")
"""Additional packages of benchmarks and tests."""
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64")


def name_of(requirement: str) -> str:
    """The normalized name of a requirement's package."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def requirements() -> list[str]:
    """The requirements of client, scheduler and worker, without the packages of the machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["scheduler"], *extras["worker"]]
    return [
        requirement for requirement in dict.fromkeys(listed) if name_of(requirement) not in PROVIDED
    ]


def install(folder: Path) -> None:
    """Install the requirements and their dependencies, without the packages of the machine."""
    pins = [f"{name}=={version}" for name, version in PINNED.items()]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        _pip(folder, "--dry-run", "--report", str(report), *requirements(), *BENCHMARKS, *pins)
        found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    carried = [f"{m['name']}=={m['version']}" for m in found if name_of(m["name"]) not in PROVIDED]
    _pip(folder, "--no-deps", *carried)


def _pip(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "install", "--target", str(folder)]
    command += ["--python-version", "3.12", "--only-binary=:all:", "--no-compile"]
    command += [word for name in _PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, *arguments], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the archive, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu-packages.tar.xz")
    args = parser.parse_args(arguments)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        install(Path(temporary))
        with tarfile.open(args.output, "w:xz") as archive:
            archive.add(temporary, ".")
    print(f"{args.output}: {args.output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
