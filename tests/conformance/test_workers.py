"""Workers that keep the contract: ours with models, the simulated one, and one in Node."""

from pathlib import Path

import pytest

from conformance import cases
from tests.support.checkpoints import checkpoint
from tests.support.processes import node_worker, python_worker, run_kit, running

CHUNKED = "model with chunks"
COMMANDS = {
    "model": python_worker(
        *("--model", "embedded", "--dtype", "float32", "--swap-space", "64MiB"),
        *("--speculative", "suffix", "--num-speculative-tokens", "5"),
    ),
    CHUNKED: python_worker(
        *("--dtype", "float32", "--kv-cache-memory", "64MiB", "--swap-space", "16MiB"),
        *("--speculative", "suffix", "--num-speculative-tokens", "5"),
    ),
    "simulated": python_worker(
        "--simulate", "--simulate-vocab-size", "997", "--speculative", "ngram"
    ),
    "cache groups": python_worker(
        *("--simulate", "--simulate-vocab-size", "997", "--speculative", "ngram"),
        *("--simulate-cache-groups", "growing:16,window:16:24,chunk:8:16,state:3,fixed:16"),
    ),
    "node": node_worker(),
    "node with cache groups": node_worker(
        "--cache-groups", "growing:16,window:16:24,chunk:8:16,state:3,fixed:16"
    ),
}
REFUSES_POOLING = ["pooling: a worker that pools no vectors refuses them"]
NEED_NO_POOLING = (
    "a row may compute the last token and bring nothing",
    "a vector of a sequence that generates is refused",
    "candidates of a sequence that samples are refused",
    "an unknown output is refused",
    "a worker that pools no vectors refuses them",
)
NO_PROFILER = ["info: a profile can be started and stopped"]
NO_TEXTS = [
    case.full_name for case in cases.ALL if case.group in ("structured output", "constrained rows")
]
POOLING = [
    case.full_name
    for case in cases.ALL
    if case.group == "pooling" and case.name not in NEED_NO_POOLING
]
OF_ANY_GROUP = (
    "a table of a group that does not exist is refused",
    "a second table of a group is refused",
    "a table that lacks what a row sees is refused",
    "an update of a group that does not exist is refused",
)
NO_GROUPS = [
    case.full_name for case in cases.ALL if case.group == "groups" and case.name not in OF_ANY_GROUP
]
ON_BLOCKS = (
    "accepted tokens are computed in their blocks",
    "the last vector is the same after a cached prefix",
    "a row may compute the last token and bring nothing",
    "a mean over cached tokens is refused",
)
OF_ONE_GROUP = [
    f"cache operations: {name}"
    for name in (
        "another sequences blocks serve as a prefix",
        "a prefix serves after its sequence is forgotten",
        "the blocks contents matter",
        "a copied block holds what its source held",
        "a copys target may be another copys source",
    )
] + [case.full_name for case in cases.ALL if case.group == "swaps" or case.name in ON_BLOCKS]
"""Cases that give a sequence blocks of the main group alone."""

OF_SEVERAL_GROUPS = (
    "released blocks may be given to others",
    "a sequence returns with tables that begin at its windows",
    "a block in tables of two groups is refused",
    "an update with a block of another groups table is refused",
)
OF_NO_CHUNKS = {
    *(name for name in NO_GROUPS if name.removeprefix("groups: ") not in OF_SEVERAL_GROUPS),
    *(*OF_ONE_GROUP, *POOLING),
}

SKIPPED = {
    CHUNKED: [case.full_name for case in cases.ALL if case.full_name in OF_NO_CHUNKS],
    "model": [*NO_GROUPS, *POOLING],
    "simulated": [*NO_PROFILER, *NO_GROUPS, *REFUSES_POOLING, *NO_TEXTS],
    "cache groups": [*NO_PROFILER, *OF_ONE_GROUP, *REFUSES_POOLING, *NO_TEXTS],
    "node": [*NO_PROFILER, *NO_GROUPS, *REFUSES_POOLING, *NO_TEXTS],
    "node with cache groups": [*NO_PROFILER, *OF_ONE_GROUP, *REFUSES_POOLING, *NO_TEXTS],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_it_passes_all_cases_and_registers_drains_and_stops(kind: str, tmp_path: Path) -> None:
    listen, core = f"unix:{tmp_path}/worker.sock", f"unix:{tmp_path}/core.sock"
    model = ["--model", str(checkpoint("llama4"))] if kind == CHUNKED else []
    command = [*COMMANDS[kind], *model, "--listen", listen, "--core", core]
    with running(command, tmp_path) as process:
        run = run_kit("--core-listen", core, "--timeout", "60")
        assert run.returncode == 0, run.stdout + run.stderr
        process.wait(timeout=60)
    lines = run.stdout.splitlines()
    skipped = [line.split("  ")[1].split(" (")[0] for line in lines if line.startswith("SKIP")]
    assert skipped == SKIPPED[kind]
    assert sum(line.startswith("PASS") for line in lines) > 150
