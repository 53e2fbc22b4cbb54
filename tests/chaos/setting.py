"""The options of a run's services, and the network between them."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from random import Random

from tests.chaos.cluster import CORE, Flags
from tests.chaos.config import ChaosConfig
from tests.chaos.namespaces import NamespaceNetwork, namespaces_permitted
from tests.chaos.network import Link, Network, star
from tests.chaos.relays import RelayNetwork
from tests.chaos.workload import EMBEDDER, adapter_names
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle_heads import head_for
from tests.support.lora import make_adapter
from tests.support.mtp_heads import make_mtp
from tools.launch import ROOT

EMBEDDED_MODEL = ROOT / "worker_service/embedded_model"
BYTES_PER_TOKEN = {"float32": 2048, "bfloat16": 1024}
"""Of KV, in the embedded model."""


def make_network(config: ChaosConfig) -> Network:
    """Of the kind that is asked for, or can be had."""
    groups = [
        [f"worker-{index}-{rank}" for rank in range(config.num_ranks)]
        if config.num_ranks > 1
        else [f"worker-{index}"]
        for index in range(config.num_workers)
    ]
    links = star(
        CORE,
        [f"frontend-{index}" for index in range(config.num_frontends)],
        [host for group in groups for host in group]
        + [f"embedder-{index}" for index in range(config.num_embedders)],
    )
    links += [Link(*ends) for ends in combinations(chain.from_iterable(groups), 2)]
    kind = config.network
    if kind == "auto":
        kind = "namespaces" if namespaces_permitted() else "relays"
    if kind == "namespaces":
        return NamespaceNetwork(links, config.has_bad_links)
    if config.has_bad_links or config.num_ranks > 1:
        raise ValueError("bad links and several ranks need network namespaces (Linux, root)")
    return RelayNetwork(links)


def model_flags(config: ChaosConfig) -> list[str]:
    """The workers' flags that decide tokens, the same for the undisturbed run."""
    flags = ["--dtype", config.dtype, "--tensor-parallel-size", str(config.num_ranks)]
    flags += ["--device", config.device]
    if config.family:
        flags += ["--model", _model(config), "--served-model-name", "embedded"]
    if config.num_adapters:
        # One slot less than there are adapters, so that requests wait for slots too.
        flags += ["--enable-lora", "--max-loras", str(max(1, config.num_adapters - 1))]
    model = _model(config)
    for number, name in enumerate(adapter_names(config.num_adapters)):
        flags += ["--lora-modules", f"{name}={_adapter(model, number)}"]
    return [*flags, "--batch-invariant"] if config.batch_invariant else flags


@cache
def _adapter(model: str, number: int) -> Path:
    path = Path(tempfile.mkdtemp(prefix="chaos-adapter-"))
    make_adapter(Path(model), path, seed=number, r=4 + number % 3 * 4)
    return path


def _model(config: ChaosConfig) -> str:
    if not config.family:
        return str(EMBEDDED_MODEL)
    return str(_checkpoint(config.family, has_head=config.speculative == "mtp"))


@cache
def _checkpoint(family: str, *, has_head: bool) -> Path:
    """A tiny random model with the embedded model's tokenizer, length and tokens that end."""
    settings = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    names = ("vocab_size", "max_position_embeddings", "eos_token_id", "bos_token_id")
    path = Path(tempfile.mkdtemp(prefix="chaos-model-"))
    own = {name: settings[name] for name in names}
    if has_head:
        path = make_mtp(family, path, **own).path
    else:
        make_checkpoint(family, path, **own)
    for source in EMBEDDED_MODEL.iterdir():
        if source.name.startswith(("tokenizer", "chat_template", "generation")):
            shutil.copy(source, path)
    return path


def embedder_flags(config: ChaosConfig) -> list[str]:
    """The flags of those that make vectors by the same weights, the same for the undisturbed
    run."""
    flags = ["--runner", "pooling", "--served-model-name", EMBEDDER]
    return [*flags, "--dtype", config.dtype, "--device", config.device]


def draw_flags(config: ChaosConfig, draw: Random) -> Flags:
    """Little memory and small steps, so that streams are also preempted, swapped and computed in
    chunks."""
    core = {
        "--lease-ms": round(config.lease_s * 1000),
        "--grace-period": 3,
        "--max-num-seqs": draw.choice((8, 16)),
        "--max-num-batched-tokens": draw.choice((48, 128)),
        "--preemption-mode": config.preemption_mode or draw.choice(("auto", "swap", "recompute")),
        "--pipeline-depth": draw.choice((1, 2, 2, 3)),
        "--first-step-timeout": 60,
        "--move-kv": "always",
    }
    worker = {
        "--threads": 1,
        "--grace-period": 20,
        "--kv-cache-memory": BYTES_PER_TOKEN[config.dtype] * 2400,
        "--swap-space": BYTES_PER_TOKEN[config.dtype] * 800,
    }
    embedder = [*embedder_flags(config), *_words(worker)]
    if config.speculative != "no":
        worker["--speculative"] = config.speculative
        worker["--num-speculative-tokens"] = draw.choice((1, 3, 5))
    if config.speculative == "draft":  # whose KV takes half of the memory
        worker["--speculative-model"] = EMBEDDED_MODEL
        worker["--kv-cache-memory"] = BYTES_PER_TOKEN[config.dtype] * 4800
    if config.speculative == "eagle":
        worker["--speculative-model"] = head_for(hidden_size=128, vocab_size=1024)
    return Flags(
        core=_words(core),
        frontend=["--grace-period", "3"],
        worker=[*model_flags(config), *_words(worker)],
        embedder=embedder,
    )


def _words(flags: Mapping[str, object]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]
