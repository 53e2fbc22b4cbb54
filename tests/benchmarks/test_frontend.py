"""The benchmark of frontends runs both ways, and sets costs in relation."""

import json
from pathlib import Path

from benchmarks.frontend import Case, Figures, main, rows_of


def test_both_ways_are_measured(tmp_path: Path) -> None:
    load = ["--streams", "4", "--tokens", "5", "--pace", "0", "--frontends", "2", "--turns", "1"]
    main([*load, "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "frontend.json").read_text())["rows"]
    assert [(row["way"], row["frontends"]) for row in rows] == [("grpc", 2), ("http", 2)]
    assert all(row["cpu_us_per_token"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert all(0 < row["tokens_per_response"] <= 5 for row in rows)


def test_costs_are_set_in_relation() -> None:
    def case(way: str, frontends: int) -> Case:
        return Case(way=way, frontends=frontends, pace=0, streams=1, tokens=1)

    def figures(cost: float) -> list[Figures]:
        return [
            Figures(cpu_us_per_token=cost, tokens_per_response=1, tokens_per_s=1) for _ in range(3)
        ]

    rows = rows_of(
        {
            case("grpc", 1): figures(10),
            case("http", 1): figures(15),
            case("grpc", 2): figures(11),
            case("http", 2): figures(12),
        }
    )
    assert [row["cost_to_grpc"] for row in rows] == [1, 1.5, 1, 1.09]
    assert [row["cost_to_one_frontend"] for row in rows] == [1, 1, 1.1, 0.8]
    assert rows[0]["tokens_per_cpu_s"] == 100_000
