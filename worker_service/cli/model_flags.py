"""Which model is served, and how it is computed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from worker_service.cli.ranks import Place
from worker_service.command_line.options import env
from worker_service.cpu_cores import parse_cpus

if TYPE_CHECKING:
    from worker_service.loader import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """Which model is served, and how it is computed."""

    model: Annotated[
        str, Option(envvar=env("MODEL"), help="Checkpoint directory, hub id, or `embedded`.")
    ] = "embedded"
    revision: Annotated[
        str | None, Option(envvar=env("REVISION"), help="Branch, tag or commit on the hub.")
    ] = None
    device: Annotated[str, Option(envvar=env("DEVICE"), help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        str, Option(envvar=env("DTYPE"), help="auto, float32, bfloat16 or float16.")
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Option(
            envvar=env("MAX_MODEL_LEN"),
            help="Most tokens of prompt and output together.",
            show_default="the model's own",
        ),
    ] = None
    load_format: Annotated[
        str,
        Option(envvar=env("LOAD_FORMAT"), help="safetensors, or dummy for random weights."),
    ] = "safetensors"
    attention_backend: Annotated[
        str | None,
        Option(
            envvar=env("ATTENTION_BACKEND"),
            help="flash, triton, cpu or reference.",
            show_default="by device and model",
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Option(
            "--batch-invariant",
            envvar=env("BATCH_INVARIANT"),
            help="On a GPU, too, tokens do not depend on what else is in the batch; slower.",
        ),
    ] = False
    threads: Annotated[
        int | None,
        Option(
            envvar=env("THREADS"),
            help="CPU threads for the model.",
            show_default="as many as it keeps busy of the physical cores there are",
        ),
    ] = None
    cpu_affinity: Annotated[
        str | None,
        Option(
            envvar=env("CPU_AFFINITY"),
            metavar="CPUS",
            help="Pin the model's threads, one each, to CPUs such as 0,2-5.",
            show_default="the system places them",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Option(
            "--trust-remote-code",
            envvar=env("TRUST_REMOTE_CODE"),
            help="Run Python code that comes with a checkpoint.",
        ),
    ] = False

    def config(self, place: Place) -> "ModelConfig":
        """The settings of one rank. Raises InvalidOption."""
        # Imports torch, which takes seconds: not for `--help`, nor for a simulation.
        from worker_service.loader import ModelConfig

        return ModelConfig(
            model=self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            load_format=self.load_format,
            max_model_len=self.max_model_len,
            attention_backend=self.attention_backend,
            batch_invariant=self.batch_invariant,
            threads=self.threads,
            cpus=None if self.cpu_affinity is None else parse_cpus(self.cpu_affinity),
            trust_remote_code=self.trust_remote_code,
            layout=place.group.layout,
            local_rank=place.local_rank,
        )
