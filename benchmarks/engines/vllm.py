"""vLLM's offline `LLM`, in a child under the Python that has it; and its best settings on a CPU."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import json_lines

if TYPE_CHECKING:  # not to be known where vLLM is
    from benchmarks.engines.engine import Settings

NAME = "vllm"

VARIABLES = (
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_INT4_W4A8",
    "LD_PRELOAD",
)
"""Environment variables that change its speed, reported with its settings. With
`VLLM_CPU_INT4_W4A8=0` it does not round the activations of AWQ checkpoints to 8 bits."""


def described(settings: "Settings") -> dict[str, Any]:
    """The settings as the child receives them."""
    chosen = {
        "model": settings.model(),
        **settings.named("dtype", *settings.LIMITS),
        "enable_prefix_caching": True,
    }
    if settings.lora_modules:
        chosen |= {"enable_lora": True, **settings.named("max_loras", "lora_modules")}
    if settings.device != "cpu":
        # At start it checks whether this share is free, and then allocates the configured KV cache.
        chosen |= {
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": settings.kv_cache_gib * 2**30,
        }
    return chosen


def environment(python: Path, settings: "Settings") -> dict[str, str]:
    """Environment variables of vLLM; on a CPU, the best that were tried."""
    common = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if settings.device != "cpu":
        return common | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    preloads = [*_find(Path("/usr/lib"), "libtcmalloc_minimal.so.4")]
    preloads += _find(python.parents[1] / "lib", "libiomp5.so")
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "LD_PRELOAD": ":".join(preloads),
    }


def server_command(python: Path, settings: "Settings", host: str, port: int) -> list[str]:
    """The command that starts its API server."""
    flags = {"model": settings.model(), "host": host, "port": port}
    flags |= settings.named("dtype", *settings.LIMITS)
    module = "vllm.entrypoints.openai.api_server"
    return [str(python), "-m", module, *options(flags), "--enable-prefix-caching"]


def options(flags: Mapping[str, object]) -> list[str]:
    """Command-line options by the names of flags."""
    names = {name: "--" + name.replace("_", "-") for name in flags}
    return [part for name, value in flags.items() for part in (names[name], str(value))]


def _find(folder: Path, name: str) -> list[str]:
    return [str(path) for path in sorted(folder.rglob(name))[:1]]


class Vllm:
    """The child's end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._settings = settings
        self._adapters = settings.pop("lora_modules", {})
        self._llm = LLM(**settings)

    def about(self) -> dict[str, Any]:
        """Version and settings."""
        import vllm

        environment = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
        if "LD_PRELOAD" in environment:
            preloads = environment["LD_PRELOAD"].split(":")
            environment["LD_PRELOAD"] = ":".join(Path(path).name for path in preloads)
        given = {name: value for name, value in self._settings.items() if name != "model"}
        return {"version": vllm.__version__, "settings": given | environment}

    def generate(
        self,
        prompts: list[list[int]],
        num_tokens: list[int],
        adapters: list[str | None] | None = None,
    ) -> list[list[int]]:
        """Greedy tokens for each prompt, with the adapters of these names."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        names = [*self._adapters]
        requests = [
            name and LoRARequest(name, 1 + names.index(name), self._adapters[name])
            for name in adapters or ()
        ]

        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in num_tokens],
            use_tqdm=False,
            lora_request=requests or None,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    json_lines.serve(Vllm)
