"""LoRA and prompt adapters: made by PEFT, which is also what they are compared with, or for any
model."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.float64 import Float64
from tests.support.text_models import class_of
from worker_service.adapters.peft_format import STACKS, WEIGHTS_FILE, LoraModule, ModelAdapter
from worker_service.models.adapters import layers_of
from worker_service.models.linear.linear import RowParallelLinear
from worker_service.models.linear.vocabulary import VocabEmbedding
from worker_service.models.native import NativeModel

LAYERS, EXPERTS, EMBEDDING, HEAD = "layers", "experts", "embedding", "head"

_SIZE = 0.5
"""Of the numbers of random adapters, so that they change tokens, but keep sums as small as those of
the base."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in a folder, and the model of `transformers` with it, not merged. It is evaluated
    in float64: of two evaluations in float32, neither is exact."""

    folder: Path
    model: Any

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[num_tokens, vocab_size]."""
        with Float64():
            logits: Tensor = self.model.double()(torch.tensor([tokens])).logits[0]
        return logits

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], num_tokens: int
    ) -> tuple[list[int], list[list[float]]]:
        """A greedy continuation, and the log probabilities of all tokens at each of its places."""
        tokens, logprobs = list(prompt), []
        for _ in range(num_tokens):
            logits = self.logits(tokens)[-1]
            logprobs.append(logits.log_softmax(-1).tolist())
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :], logprobs

    def choices(
        self, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[list[int], list[list[float]]]:
        """The likeliest token in place of each of an output's, which is the output itself if it is
        the greedy continuation, and the log probabilities there; in a single pass."""
        logits = self.logits([*prompt, *output[:-1]])[-len(output) :]
        return logits.argmax(dim=-1).tolist(), logits.log_softmax(-1).tolist()


def _save(adapted: Any, folder: Path) -> None:
    """Save an adapter without a model card, which takes longer than all else."""
    adapted.create_or_update_model_card = lambda folder: None
    adapted.save_pretrained(folder)


def load_base(base: Path, *, generates: bool = True) -> Any:
    """The model of `transformers`, in float32, whose operations all exist in float64, too.
    generates: as of `make_adapter`."""
    from transformers import AutoConfig, AutoModel

    kind = class_of(AutoConfig.from_pretrained(base)) if generates else AutoModel
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return kind.from_pretrained(base, dtype=torch.float32, **eager)


def make_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int = 0,
    generates: bool = True,
    targets: Sequence[str] = (LAYERS,),
    **settings: Any,
) -> PeftAdapter:
    """An adapter with random matrices.

    generates: of a model with an LM head; else of one that makes vectors; targets: some of
    `LAYERS`, which are all linear layers without the LM head, `EXPERTS`, `EMBEDDING`, `HEAD`.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    model = load_base(base, generates=generates)
    vocabulary = {EMBEDDING: model.get_input_embeddings(), HEAD: model.get_output_embeddings()}
    names = set()
    for name, module in model.named_modules():
        kind = next((kind for kind, part in vocabulary.items() if part is module), LAYERS)
        if kind in targets and (kind != LAYERS or isinstance(module, nn.Linear | Conv1D)):
            names.add(name.rpartition(".")[2])
    defaults: dict[str, Any] = {"target_modules": sorted(names) or None, "init_lora_weights": False}
    if EXPERTS in targets:
        found = (name for name, _ in model.named_parameters() if ".experts." in name)
        ends = {".".join(name.rsplit(".", 2)[1:]) for name in found}
        defaults["target_parameters"] = sorted(end for end in ends if end.endswith("proj"))
    torch.manual_seed(seed)
    task_type = "CAUSAL_LM" if generates else "FEATURE_EXTRACTION"
    config = LoraConfig(task_type=task_type, **(defaults | settings))
    with warnings.catch_warnings():  # of deprecated attributes, and of Conv1D
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_magnitude" in name:  # PEFT has set it to the norms of rows
            nn.init.uniform_(factors := torch.empty_like(parameter), 0.7, 1.4)
            parameter.data.mul_(factors)
        elif "lora_" in name:
            nn.init.normal_(parameter, std=_SIZE * parameter.shape[1] ** -0.5)
    with warnings.catch_warnings():  # that embeddings are saved
        warnings.simplefilter("ignore")
        _save(adapted, folder)
    return PeftAdapter(folder, adapted)


def make_prompt(
    base: Path, folder: Path, *, num_tokens: int, seed: int = 0, is_encoded: bool = False
) -> PeftAdapter:
    """A prompt adapter with random embeddings. is_encoded: of P-tuning, whose encoder makes them
    when it is saved; the model has those that are read again."""
    from peft import PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model

    model = load_base(base)
    torch.manual_seed(seed)
    kind = PromptEncoderConfig if is_encoded else PromptTuningConfig
    width = model.get_input_embeddings().weight.shape[1]
    sizes: dict[str, Any] = {"encoder_hidden_size": width} if is_encoded else {}
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=num_tokens, token_dim=width, **sizes)
    with warnings.catch_warnings():  # of deprecated attributes
        warnings.simplefilter("ignore")
        _save(get_peft_model(model, config), folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    # Embeddings as large as those of tokens.
    scale = (
        model.get_input_embeddings()(torch.arange(32)).std() / tensors["prompt_embeddings"].std()
    )
    save_file({"prompt_embeddings": tensors["prompt_embeddings"] * scale}, folder / WEIGHTS_FILE)
    plain = load_base(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftAdapter(folder, PeftModel.from_pretrained(plain, folder).eval())


def random_prompt(model: NativeModel, seed: int, *, num_tokens: int) -> ModelAdapter:
    """A prompt adapter with random embeddings."""
    generator = torch.Generator().manual_seed(seed)
    size = model.virtual_token_size
    assert size is not None, "tokens cannot be replaced"
    return ModelAdapter.of_modules({}, torch.randn(num_tokens, size, generator=generator))


def random_adapter(
    model: NativeModel, seed: int, *, rank: int = 4, uses_dora: bool = False
) -> ModelAdapter:
    """An adapter with random matrices of all layers of a model of one rank. uses_dora: of those
    whose inputs ranks would not share, with magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for layer in layers_of(model):
        if uses_dora and isinstance(layer, RowParallelLinear | VocabEmbedding):
            continue
        for name, part in layer.parts():
            if name.endswith(STACKS):  # experts have modules of their own, too
                continue
            num_outputs, num_inputs = part.source_shape
            a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * rank**-0.5
            magnitudes = 0.5 + torch.rand(num_outputs, generator=generator) if uses_dora else None
            modules[name] = LoraModule(a, b, 1.0, magnitudes=magnitudes)
    return ModelAdapter.of_modules(modules)
