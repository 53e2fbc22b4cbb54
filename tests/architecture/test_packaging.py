"""What is built and shipped is what pyproject.toml names."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_images_are_built_from_every_folder_that_holds_a_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert all((ROOT / package).is_dir() for package in packages)
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    folders = {package.split("/")[0] for package in packages}
    assert [
        folder for folder in sorted(folders) if f"COPY {folder} {folder}" not in dockerfile
    ] == []
