"""The fastest backend is chosen, and what was measured is kept."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire_kernels import backend_speed
from pagewire_kernels.backend_speed import attention_seconds, fastest, measured_seconds
from pagewire_kernels.interface import Abilities, AttentionBackend, AttentionNeeds
from pagewire_kernels.reference.backend import ReferenceBackend
from pagewire_kernels.select import choose, select_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEEDS = AttentionNeeds(dtype=torch.bfloat16, head_dim=128)


class FakeBackend(ReferenceBackend):
    """A backend with any name, and speed."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.abilities = Abilities()
        self.seconds = seconds


class Bench:
    """A machine with some backends, on which measurements are counted."""

    def __init__(self, file: Path, **seconds: float) -> None:
        self.backends = [FakeBackend(name, number) for name, number in seconds.items()]
        self.measured: list[str] = []
        self.file = file

    def measure(self, backend: AttentionBackend, *_: object) -> float:
        assert isinstance(backend, FakeBackend)
        self.measured.append(backend.name)
        if backend.seconds < 0:
            raise RuntimeError("out of memory")
        return backend.seconds

    def choice(self, name: str | None = None, needs: AttentionNeeds = NEEDS) -> str:
        def speeds(able: dict[str, AttentionBackend]) -> dict[str, float]:
            return measured_seconds(able, GPU, needs, self.file, self.measure)

        offered = [each for each in self.backends if name in (None, each.name)]

        def with_oracle() -> Iterator[AttentionBackend]:
            yield from offered
            if name is None:
                yield ReferenceBackend()

        return choose(GPU, name, needs, with_oracle(), lambda *_: None, speeds).name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache/attention_speed.json"


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_the_fastest_is_taken_whatever_its_place(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert Bench(file, flash=2e-4, triton=3e-4, other=1e-4).choice() == "other"
    assert "name=other reason=fastest of flash 200 us, triton 300 us, other 100 us" in caplog.text
    assert not _warnings(caplog)


def test_a_later_one_must_be_clearly_faster() -> None:
    assert fastest(["a", "b"], {"a": 1.0, "b": 0.97}) == "a"
    assert fastest(["a", "b"], {"a": 1.0, "b": 0.90}) == "b"
    assert fastest(["a", "b", "c"], {"a": 1.0, "b": 0.90, "c": 0.88}) == "b"
    assert fastest(["a", "b"], {"b": 5.0}) == "b", "the other could not be measured"
    assert fastest(["a", "b"], {}) == "a"


def test_what_was_measured_is_read_back(file: Path) -> None:
    first, second = (Bench(file, flash=2e-4, triton=1e-4) for _ in range(2))
    assert first.choice() == second.choice() == "triton"
    assert (first.measured, second.measured) == (["flash", "triton"], [])
    # Another model's heads are another measurement, and leave the first in place.
    other = replace(NEEDS, num_kv_heads=4)
    assert second.choice(needs=other) == "triton"
    assert second.measured == ["flash", "triton"]
    third = Bench(file, flash=2e-4, triton=1e-4)
    assert third.choice() == third.choice(needs=other) == "triton"
    assert third.measured == []
    [*_] = [
        float(each) for table in json.loads(file.read_text()).values() for each in table.values()
    ]
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_package_installed_since_is_measured_alone(file: Path) -> None:
    Bench(file, triton=2e-4, flash=3e-4).choice()
    bench = Bench(file, new=1e-4, triton=9.0, flash=9.0)
    assert bench.choice() == "new"
    assert bench.measured == ["new"]


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"cuda": 3}', '{"cuda": {"triton": "fast"}}', '{"a": {"b": null}}']
)
def test_a_bad_file_is_ignored_with_one_line_and_replaced(
    file: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    file.parent.mkdir()
    file.write_text(content)
    bench = Bench(file, flash=2e-4, triton=1e-4)
    assert bench.choice() == "triton"
    (line,) = _warnings(caplog)
    assert str(file) in line
    assert bench.choice() == "triton"
    assert bench.measured == ["flash", "triton"]
    assert len(_warnings(caplog)) == 1


def test_a_folder_that_cannot_be_written_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    bench = Bench(tmp_path / "cache/folder/speeds.json", flash=2e-4, triton=1e-4)
    assert bench.choice() == "triton"
    (line,) = _warnings(caplog)
    assert "speeds of attention are not kept" in line


def test_a_requested_backend_is_taken_unmeasured(file: Path) -> None:
    bench = Bench(file, flash=2e-4, triton=1e-4)
    assert bench.choice("flash") == "flash"
    assert not bench.measured
    assert not file.exists()


def test_one_backend_needs_no_measurement(file: Path) -> None:
    bench = Bench(file, triton=1e-4)
    assert bench.choice() == "triton"
    assert not bench.measured


def test_a_backend_that_cannot_be_measured_is_not_taken(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(file, flash=-1.0, triton=1e-4)
    assert bench.choice() == "triton"
    (line,) = _warnings(caplog)
    assert "name=flash error=out of memory" in line


def test_a_measurement_covers_decodes_and_a_chunk() -> None:
    sizes_seen: set[tuple[int, int]] = set()

    class Counting(ReferenceBackend):
        def paged_attention(self, query, *args, **kwargs):  # type: ignore[no-untyped-def,override]
            sizes_seen.add((len(args[2].context_lens), len(query)))
            return super().paged_attention(query, *args, **kwargs)

    needs = AttentionNeeds(
        dtype=torch.float32, head_dim=8, num_heads=4, num_kv_heads=2, sliding_window=True
    )
    sizes = {"num_decodes": 3, "context": 40, "chunk": 5, "repeats": 1}
    assert attention_seconds(Counting(), CPU, needs, **sizes) > 0.0
    assert sizes_seen == {(3, 3), (4, 8)}


def test_mixed_batches_that_cannot_be_captured_are_measured_as_eager_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[list[int]] = []

    class Eager(ReferenceBackend):
        abilities = Abilities(mixed_graphs=False)

        def paged_attention(self, query, key, value, metadata, **kwargs):  # type: ignore[no-untyped-def,override]
            layers = metadata.plans.setdefault("layers", [])
            if not layers:
                plans.append(layers)
            layers.append(len(query))
            return super().paged_attention(query, key, value, metadata, **kwargs)

    monkeypatch.setattr(backend_speed, "_EAGER_LAYERS", 3)
    needs = AttentionNeeds(dtype=torch.float32, head_dim=8, num_heads=4, num_kv_heads=2)
    sizes = {"num_decodes": 3, "context": 40, "chunk": 5, "repeats": 2}
    assert attention_seconds(Eager(), CPU, needs, **sizes) > 0.0
    # Of the decodes one batch, which a graph repeats; a new one for each mixed step.
    assert [layers[0] for layers in plans] == [3, 8, 8, 8, 8]
    assert all(len(layers) == 3 for layers in plans[1:])


def test_a_cpu_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert backend_speed.default_file() == tmp_path / "pagewire/attention_speed.json"
    assert select_backend(CPU, by_speed=True).name == "cpu"
    assert not [*tmp_path.iterdir()]
