"""Vectors of texts: all-MiniLM-L6-v2 through Pagewire's services and by other libraries.

    python -m benchmarks.embeddings MINILM --peers-python PEERS/bin/python --onnx O2/model.onnx

256 texts of 10 to 256 tokens in one call, and one query of 10 tokens at a time. The engines take
turns, and the libraries, which run in their own processes, are stopped while others run. All
vectors are compared with those of the reference first. The floor is the time of the model's matrix
products at the machine's best rate.

    python -m benchmarks.embeddings random --device cuda --dtype float32 --reference transformers

The same on a GPU; the weights of the model may be random.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.engines.embedders import over_http, timed
from benchmarks.measuring.ceilings import CeilingsProcess
from benchmarks.measuring.json_lines import LineProcess
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm, processor_seconds, send_signal
from benchmarks.measuring.tables import publish, script_parser
from benchmarks.models.encoder import write_encoder
from pagewire_client import Client
from tests.support.cluster import Cluster
from tools.launch import ROOT, free_port
from worker_service.config import QUANTIZATIONS

NUM_TEXTS, MIN_TOKENS, MAX_TOKENS = 256, 10, 256
NUM_QUERIES, NUM_SHORT = 40, 4096
"""Queries in a turn, and short texts of which the frontend's time is measured."""
RANDOM = "random"
TOLERANCE = 2e-5
"""Of Pagewire's vectors in float32."""


class Library(LineProcess):
    """A library in a child process, which is stopped while others run."""

    def __init__(self, python: str, settings: dict[str, Any]) -> None:
        command = [python, "-m", "benchmarks.engines.embedders", json.dumps(settings)]
        super().__init__(command, {"PYTHONPATH": str(ROOT)})
        self.name = self.ready["name"]
        send_signal(self.pid, signal.SIGSTOP)

    def run(self, texts: list[str], repeats: int) -> tuple[Any, list[float]]:
        """As `timed`."""
        send_signal(self.pid, signal.SIGCONT)
        answer = self.ask({"texts": texts, "repeats": repeats})
        send_signal(self.pid, signal.SIGSTOP)
        return np.array(answer["vectors"]), answer["seconds"]

    def close(self, timeout_s: float = 30.0) -> None:
        """End the process."""
        send_signal(self.pid, signal.SIGCONT)
        super().close(timeout_s)


class Engine:
    """What embeds texts in one data type, and its measurements."""

    def __init__(self, name: str, dtype: str, run: Any) -> None:
        """run: as `timed`, from texts and a number of repeats."""
        self.name, self.dtype, self.run = name, dtype, run
        self.seconds: list[float] = []
        self.query_s: list[float] = []
        self.difference = 0.0

    def check(self, texts: list[str], reference: Any) -> None:
        """Compare the vectors. Raises ValueError if Pagewire's of float32 differ."""
        self.difference = float(np.abs(self.run(texts, 1)[0] - reference).max())
        is_ours = self.name.startswith("pagewire")
        if is_ours and self.dtype == "float32" and self.difference > TOLERANCE:
            raise ValueError(f"{self.name}: vectors differ by {self.difference}")

    def take_turn(self, texts: list[str], query: str) -> None:
        """Embed all texts, and the query several times."""
        self.seconds += self.run(texts, 1)[1]
        self.query_s += self.run([query], NUM_QUERIES)[1]
        print(f"{self.name:32} {self.dtype:10} {self.seconds[-1]:6.2f} s", flush=True)

    def row(self, fastest_s: float, num_tokens: int) -> dict[str, object]:
        """Its row in the table; fastest_s: the time of Pagewire in its data type."""
        seconds = median(self.seconds)
        return {
            "engine": self.name,
            "dtype": self.dtype,
            "tokens_per_s": num_tokens / seconds,
            "ratio": round(seconds / fastest_s, 2),
            "query_ms": round(1e3 * median(self.query_s), 2),
            "difference": float(f"{self.difference:.1g}"),
            "seconds": self.seconds,
        }


def serve(args: argparse.Namespace, dtype: str, stack: ExitStack) -> tuple[Cluster, list[Engine]]:
    """Pagewire's services, called over gRPC and over HTTP."""
    flags = ["--quantization" if dtype in QUANTIZATIONS else "--dtype", dtype]
    cluster = Cluster(
        Path(stack.enter_context(tempfile.TemporaryDirectory())),
        model=str(args.model),
        worker_flags=["--device", args.device, "--threads", str(args.threads), *flags],
        frontend_flags=["--http", "127.0.0.1:0"],
    )
    stack.enter_context(cluster).start()
    client = stack.enter_context(Client(cluster.frontend_address()))
    ways = {"gRPC": client.embed, "HTTP": over_http(cluster.http_url().removeprefix("http://"))}
    return cluster, [Engine(f"pagewire, {way}", dtype, partial(timed, ways[way])) for way in ways]


def libraries(args: argparse.Namespace, stack: ExitStack) -> list[Engine]:
    """The others whose files were given; the first one is the reference."""
    dtypes = args.dtype if args.reference == "transformers" else ["float32"]
    rows: list[tuple[str, str, dict[str, str | None]]] = [
        *((args.reference, dtype, {}) for dtype in dtypes if dtype not in QUANTIZATIONS),
        ("onnxruntime", "float32", {"onnx": args.onnx}),
        ("onnxruntime", "w8a8", {"onnx": args.onnx_int8}),
        ("fastembed", "float32", {"onnx": args.onnx}),
        ("llama_server", "float32", {"server": args.llama_server, "gguf": args.gguf}),
    ]
    engines = []
    for name, dtype, files in rows:
        if all(files.values()):
            settings = {
                "library": name,
                "model": str(args.model),
                "threads": args.threads,
                "device": args.device,
                "dtype": dtype,
                "port": free_port(),
                **files,
            }
            child = stack.enter_context(Library(args.peers_python, settings))
            engines.append(Engine(child.name, dtype, child.run))
    return engines


def draw_texts(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[str]:
    """Words of one token each; a length includes two special tokens."""
    draw = random.Random(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    return [" ".join(draw.choices(words, k=length - 2)) for length in lengths]


def flops(model: Path, lengths: Sequence[int]) -> float:
    """Floating-point operations of the linear layers and the attention of a BERT."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    linear = 4 * hidden * (2 * hidden + inner)
    by_text = [length * linear + 4 * length * length * hidden for length in lengths]
    return float(config["num_hidden_layers"] * sum(by_text))


def frontend_ms(cluster: Cluster, grpc: Engine, texts: list[str]) -> float:
    """The frontend's processor time per text."""
    pid = cluster.frontends[0].process.pid
    began = processor_seconds(pid)
    grpc.run(texts, 1)
    return 1e3 * (processor_seconds(pid) - began) / len(texts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    args = parse(arguments)
    exit_on_sigterm()
    load = ForeignLoad()
    lengths = [random.Random(i).randint(MIN_TOKENS, MAX_TOKENS) for i in range(args.texts)]
    with ExitStack() as stack:
        if str(args.model) == RANDOM:
            args.model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_encoder(args.model)
        args.model = args.model.resolve()
        num_operations = flops(args.model, lengths)
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        texts = draw_texts(tokenizer, lengths)
        short = draw_texts(tokenizer, [MIN_TOKENS] * args.short)
        clusters, ours = zip(*(serve(args, dtype, stack) for dtype in args.dtype), strict=True)
        others = libraries(args, stack)
        engines = [*(engine for both in ours for engine in both), *others]
        reference = others[0].run(texts, 1)[0]
        for engine in engines:
            engine.check(texts, reference)
        ceilings = stack.enter_context(CeilingsProcess("float32", args.device, args.threads))
        measured = ceilings.measure()
        for turn in range(args.turns):
            first = turn % len(engines)
            for engine in [*engines[first:], *engines[:first]]:
                engine.take_turn(texts, short[0])
            measured = measured.mean(ceilings.measure())
        cpu_ms = median(frontend_ms(clusters[0], ours[0][0], short) for _ in range(3))
    fastest = {grpc.dtype: median(grpc.seconds) for grpc, _ in ours}
    share = num_operations / measured.flops_per_s / median(ours[0][0].seconds)
    rows = [engine.row(fastest.get(engine.dtype, float("nan")), sum(lengths)) for engine in engines]
    facts = (
        f"{args.texts} texts of {MIN_TOKENS} to {MAX_TOKENS} tokens. In {args.dtype[0]}, Pagewire"
        f" needs the time of the floor times {1 / share:.2f}. Processor time of the frontend per"
        f" text of {MIN_TOKENS} tokens: {cpu_ms:.3f} ms."
    )
    publish("embeddings", facts, COLUMNS, rows, load.cores, args.results, share_of_floor=share)


COLUMNS = {
    "engine": "engine",
    "dtype": "type",
    "tokens_per_s": "tokens/s",
    "ratio": "its time ÷ Pagewire's",
    "query_ms": "one query, p50 ms",
    "difference": "largest difference",
}
"""Titles by the names in a row."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = script_parser(__doc__)
    parser.add_argument(
        "model", type=Path, help=f"the folder of all-MiniLM-L6-v2, or {RANDOM} for its shape"
    )
    parser.add_argument("--peers-python", default=sys.executable, help="that has the libraries")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--reference",
        default="sentence_transformers",
        choices=["sentence_transformers", "transformers"],
        help="the library that others' vectors are compared with",
    )
    parser.add_argument("--onnx", help="model.onnx, beside the tokenizer's files")
    parser.add_argument("--onnx-int8", help="the same, quantized")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--gguf", help="the model for it, in float32")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "int8", "w8a8"], help="Pagewire's"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="in a call")
    parser.add_argument("--short", type=int, default=NUM_SHORT, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
