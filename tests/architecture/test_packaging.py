"""What is built and shipped is what pyproject.toml names."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_images_are_built_from_every_package_and_from_nothing_that_is_not_sent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert all((ROOT / package).is_dir() for package in packages)
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    assert [name for name in packages if f"COPY {name} {name}" not in dockerfile] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [Path(line[1:]) for line in lines if line.startswith("!")]
    copied = [
        Path(source)
        for line in dockerfile
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert [source for source in copied if not {source, *source.parents} & {*sent}] == []


def test_the_types_of_what_users_import_are_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in ("client/pagewire_client", "protos/pagewire"):
        assert package in packages
        assert (ROOT / package / "py.typed").is_file()
