"""Whatever is killed, stopped or disconnected, every stream equals that of an undisturbed run.

A short run; `make chaos` makes long ones.
"""

from pathlib import Path

import pytest

from tests.chaos.config import ChaosConfig
from tests.chaos.conftest import run_to_end
from tests.chaos.namespaces import namespaces_permitted
from tests.chaos.report import Report
from tests.chaos.workload import CHOOSING, EXTRAS, draw_asks

pytestmark = pytest.mark.timeout(1200)
"""Much longer than needed, because processes start slowly on a busy machine."""

needs_namespaces = pytest.mark.skipif(
    not namespaces_permitted(), reason="needs network namespaces and TUN devices (Linux, root)"
)


def test_no_stream_is_lost_repeated_different_or_hung(short_run: Report) -> None:
    assert short_run.faults == []


def test_enough_was_killed_and_enough_was_streamed(
    short_run: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{short_run.num_streams} streams, kills: {short_run.kills}")
    assert sum(short_run.kills.values()) >= 6
    assert set(short_run.kills) >= {"core", "frontend", "worker", "embedder"}
    assert short_run.num_streams >= 12
    assert short_run.num_vectors >= short_run.config.num_texts
    assert set(short_run.kinds) >= set(CHOOSING)


def test_requests_are_of_every_kind() -> None:
    kinds = {kind for ask in draw_asks(0, 200) for kind in ask.kinds}
    assert kinds >= {*CHOOSING, *EXTRAS, "text", "token ids", "long token ids", "chat"}


@pytest.mark.long
@needs_namespaces
def test_ranks_on_two_hosts_lose_nothing_on_slow_and_lossy_links(tmp_path: Path) -> None:
    config = ChaosConfig(
        seed=32,  # short answers: a token takes a tenth of a second there
        num_kills=2,
        num_streams=8,
        num_asks=6,
        num_workers=2,
        num_ranks=2,
        has_bad_links=True,
        max_open_streams=6,
        num_monkeys=2,
    )
    report = run_to_end(config, tmp_path)
    assert report.faults == []
    assert report.num_streams >= config.num_streams


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize(("num_workers", "num_ranks"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("seed", [1, 2])
def test_long_runs_on_bad_links_find_nothing_either(
    num_workers: int, num_ranks: int, seed: int, tmp_path: Path
) -> None:
    config = ChaosConfig(
        seed=seed,
        num_kills=30,
        num_streams=60,
        num_workers=num_workers,
        num_ranks=num_ranks,
        has_bad_links=True,
    )
    assert run_to_end(config, tmp_path).faults == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("speculative", "family"),
    [("ngram", ""), ("draft", ""), ("eagle", ""), ("mtp", "glm4_moe"), ("mtp", "qwen3_next")],
)
def test_long_runs_with_drafts_equal_one_without(
    speculative: str, family: str, tmp_path: Path
) -> None:
    config = ChaosConfig(
        speculative=speculative, family=family, num_kills=100, num_streams=200, num_asks=60
    )
    assert run_to_end(config, tmp_path).faults == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 2])
def test_long_runs_find_nothing_either(dtype: str, seed: int, tmp_path: Path) -> None:
    config = ChaosConfig(seed=seed, dtype=dtype, num_kills=40, num_streams=120, num_asks=60)
    assert run_to_end(config, tmp_path).faults == []


@pytest.mark.long
def test_long_runs_with_adapters_find_nothing_either(tmp_path: Path) -> None:
    config = ChaosConfig(seed=6, num_kills=100, num_streams=300, num_asks=60, num_adapters=3)
    report = run_to_end(config, tmp_path)
    assert report.faults == []
    assert "adapter" in report.kinds


@pytest.mark.long
@pytest.mark.parametrize("family", ["lfm2_moe", "falcon_h1", "mamba2"])
def test_long_runs_with_states_find_nothing_either(family: str, tmp_path: Path) -> None:
    config = ChaosConfig(seed=5, num_kills=30, num_streams=100, family=family)
    assert run_to_end(config, tmp_path).faults == []
