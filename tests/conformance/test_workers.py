"""Workers that keep the contract: ours with models, the simulated one, and one in Node.

Of workers that differ in a part from another one, the default suite runs the cases of that part,
and `make test-long` all.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from conformance import cases
from conformance.__main__ import main
from tests.support.checkpoints import checkpoint
from tests.support.processes import node_worker, python_worker, running

CHUNKED = "model with chunks"
STATES = "model with states"
FAMILIES = {CHUNKED: "llama4", STATES: "lfm2"}
NO_CACHE = "no cache groups"
NODE_NO_CACHE = "node without cache groups"
COMMANDS = {
    "model": python_worker(
        *("--model", "embedded", "--dtype", "float32"),
        *("--kv-cache-memory", "64MiB", "--swap-space", "16MiB"),
        *("--speculative", "suffix", "--num-speculative-tokens", "5"),
    ),
    CHUNKED: python_worker(
        *("--dtype", "float32", "--kv-cache-memory", "64MiB", "--swap-space", "16MiB"),
        *("--speculative", "suffix", "--num-speculative-tokens", "5"),
    ),
    STATES: python_worker(
        *("--dtype", "float32", "--kv-cache-memory", "64MiB", "--swap-space", "16MiB"),
    ),
    "simulated": python_worker(
        "--simulate", "--simulate-vocab-size", "997", "--speculative", "ngram"
    ),
    "cache groups": python_worker(
        *("--simulate", "--simulate-vocab-size", "997", "--speculative", "ngram"),
        *("--simulate-cache-groups", "growing:16,window:16:24,chunk:8:16,state:3,fixed:16"),
    ),
    "adapters": python_worker(
        *("--simulate", "--simulate-vocab-size", "997", "--speculative", "ngram", "--enable-lora")
    ),
    NO_CACHE: python_worker(
        *("--simulate", "--simulate-vocab-size", "997", "--simulate-cache-groups", "none"),
        *("--simulate-labels", "1"),
    ),
    "node": node_worker(),
    "node with cache groups": node_worker(
        "--cache-groups", "growing:16,window:16:24,chunk:8:16,state:3,fixed:16"
    ),
    NODE_NO_CACHE: node_worker("--cache-groups", "none"),
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
OF_ONE_GROUP += ["moves: fetched blocks serve as a prefix"]
OF_ONE_GROUP += ["records: recorded blocks keep their contents"]
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

NO_SOURCES = [name for name in NO_GROUPS if "source" in name]
NO_WINDOWS = [f"groups: {name}" for name in OF_SEVERAL_GROUPS[:2]]
NO_DRAFTS = ["drafts: right drafts are kept"]

SKIPPED = {
    STATES: [*OF_ONE_GROUP, *NO_SOURCES, *NO_WINDOWS, *NO_DRAFTS, *POOLING],
    CHUNKED: [case.full_name for case in cases.ALL if case.full_name in OF_NO_CHUNKS],
    "model": [*NO_GROUPS, *POOLING],
    "simulated": [*NO_PROFILER, *NO_GROUPS, *REFUSES_POOLING, *NO_TEXTS],
    "adapters": [*NO_PROFILER, *NO_GROUPS, *REFUSES_POOLING, *NO_TEXTS],
    "cache groups": [*NO_PROFILER, *OF_ONE_GROUP, *REFUSES_POOLING, *NO_TEXTS],
    "node": [*NO_PROFILER, *NO_GROUPS, *REFUSES_POOLING, *NO_TEXTS],
    "node with cache groups": [*NO_PROFILER, *OF_ONE_GROUP, *REFUSES_POOLING, *NO_TEXTS],
}
OF_LABELS = "pooling: labels of a model without any are refused"
A_CLASSIFIER = "pooling: a classifier brings a logit for each label"
OTHERS = ["setup: a model without cache groups has no blocks"]
OTHERS += ["pooling: a part of a whole prompt is refused"]
HAS_LABELS = ("simulated", "adapters", "cache groups")
OPTIONAL = [case.full_name for case in cases.ALL if case.group in ("moves", "records")]
ADAPTERS = [case.full_name for case in cases.ALL if case.group == "adapters"]
for _kind, _names in SKIPPED.items():
    _others = {*OTHERS, OF_LABELS if _kind in HAS_LABELS else A_CLASSIFIER, *_names}
    _others.update(ADAPTERS if _kind != "adapters" else ())
    _others.update(OPTIONAL if _kind.startswith("node") else ())
    SKIPPED[_kind] = [case.full_name for case in cases.ALL if case.full_name in _others]

OF_MODELS_WITHOUT_CACHE = {
    "setup": 4,
    "caches": 4,
    "info": 7,
    "steps": 2,
    "ordering": 3,
    "epochs": 6,
    "sequences": 11,
    "batches": 11,
    "blocks": 2,
    "forks": 1,
    "cache operations": 6,
    "groups": 1,
    "beams": 1,
    "pooling": 11,
    "robustness": 5,
    "registration": 7,
}
"""Number of cases that a worker which only pools, and keeps nothing, passes; the others are about
tokens that it does not generate and blocks that it does not have."""


ENDS = ("registration: a draining worker", "registration: a stopping worker")
"""Cases that end a worker."""

OF_CACHES = ("caches", "cache operations", "groups", "blocks", "forks", "swaps", "beams")
PARTS = {
    CHUNKED: (*OF_CACHES, "steps", "records"),
    STATES: (*OF_CACHES, "steps", "moves", "records"),
    "simulated": ("info", "adapters", "registration"),
    "cache groups": (*OF_CACHES, "records"),
    "node with cache groups": OF_CACHES,
}
"""Groups of cases about that in which a worker differs from the first of its kind, or, without
adapters, from the one that has them."""


def names_of(groups: Collection[str]) -> set[str]:
    return {
        case.full_name
        for case in cases.ALL
        if case.group in groups or case.full_name.startswith(ENDS)
    }


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        *(pytest.param(kind, PARTS.get(kind, ()), id=kind) for kind in COMMANDS),
        *(pytest.param(kind, (), id=f"{kind}, all", marks=pytest.mark.long) for kind in PARTS),
    ],
)
def test_it_passes_all_cases_and_registers_drains_and_stops(
    kind: str, groups: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listen, core = f"unix:{tmp_path}/worker.sock", f"unix:{tmp_path}/core.sock"
    model = ["--model", str(checkpoint(FAMILIES[kind]))] if kind in FAMILIES else []
    command = [*COMMANDS[kind], *model, "--listen", listen, "--core", core]
    with running(command, tmp_path) as process:
        with pytest.raises(SystemExit) as end:
            main(core_listen=core, only=[*groups, *ENDS] if groups else None)
        output = capsys.readouterr().out
        assert end.value.code == 0, output
        process.wait(timeout=60)
    lines = output.splitlines()
    passed = [line.split("  ")[1] for line in lines if line.startswith("PASS")]
    if kind in (NO_CACHE, NODE_NO_CACHE):
        assert Counter(name.split(":")[0] for name in passed) == OF_MODELS_WITHOUT_CACHE
        return
    skipped = [line.split("  ")[1].split(" (")[0] for line in lines if line.startswith("SKIP")]
    chosen = names_of(groups or {case.group for case in cases.ALL})
    assert skipped == [name for name in SKIPPED[kind] if name in chosen]
    assert len(passed) == len(chosen) - len(skipped)
    assert groups or len(passed) > 150
