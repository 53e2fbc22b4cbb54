"""Trains the embedded model and writes everything that is shipped with the package.

python -m tools.embedded_model.train --output worker_service/embedded_model --seed 0
"""

import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.embedded_model.corpus import documents
from tools.embedded_model.packing import Batch, Packer
from tools.embedded_model.tokenizer import (
    BOS,
    END,
    EOS,
    PAD,
    VOCAB_SIZE,
    save_tokenizer,
    train_tokenizer,
)

NUM_STEPS = 4500
TOKENS_PER_STEP = 2048
"""Small, since the answers get better with the number of steps more than with their size."""
WINDOW = 256
LONG_WINDOW = 1024
"""The most positions of the model."""
LONG_WINDOW_EVERY = 8
"""Every n-th step trains on long windows, so that all positions are learned."""

PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 200
FINAL_LEARNING_RATE_SHARE = 0.02
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0

NUM_THREADS = 2
"""Fixed, since sums in another order are rounded otherwise."""
LOG_EVERY = 100
CHECKPOINT_EVERY = 500

MODEL_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONG_WINDOW,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up to the peak, then half a cosine down."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    share = FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine
    return PEAK_LEARNING_RATE * share


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy of the learned tokens.

    Logits are made only where they are learned, which is at two thirds of the positions.
    """
    hidden = model.model(
        input_ids=batch.token_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    is_learned = batch.is_learned[:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_learned])
    return torch.nn.functional.cross_entropy(logits, batch.token_ids[:, 1:][is_learned])


def fit(model: LlamaForCausalLM, packer: Packer, num_steps: int, checkpoints: Path) -> None:
    """Train `model` in place; every few hundred steps store it in `checkpoints`."""
    optimizer = make_optimizer(model)
    started = time.monotonic()
    for step in range(num_steps):
        window = LONG_WINDOW if step % LONG_WINDOW_EVERY == 0 else WINDOW
        loss = loss_of(model, packer.batch(TOKENS_PER_STEP // window, window))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % LOG_EVERY == 0:
            seconds = time.monotonic() - started
            speed = f"elapsed_s={seconds:.0f} tokens_per_s={done * TOKENS_PER_STEP / seconds:.0f}"
            typer.echo(f"step={done} loss={loss.item():.4f} {speed}")
        if done % CHECKPOINT_EVERY == 0 and done < num_steps:
            save_model(model, checkpoints)


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write config, generation config and weights in bfloat16; `model` stays in float32."""
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = model.generation_config
    stored.to(torch.bfloat16).save_pretrained(directory)


def main(
    output: Annotated[Path, typer.Option(help="Folder to write the artefacts to.")],
    seed: Annotated[int, typer.Option(help="Seed of the corpus and of the weights.")] = 0,
    num_steps: Annotated[int, typer.Option(help="Optimizer steps.")] = NUM_STEPS,
) -> None:
    """Train the embedded model and write its artefacts."""
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)

    tokenizer = train_tokenizer(seed)
    save_tokenizer(tokenizer, output, LONG_WINDOW)
    bos, eos, end, pad = (tokenizer.token_to_id(token) for token in (BOS, EOS, END, PAD))
    config = LlamaConfig(
        **MODEL_CONFIG, bos_token_id=bos, eos_token_id=[eos, end], pad_token_id=pad
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=bos, eos_token_id=[eos, end], pad_token_id=pad, do_sample=False
    )
    typer.echo(f"parameters={model.num_parameters()}")

    fit(model, Packer(tokenizer, documents(seed)), num_steps, output)
    save_model(model, output)


if __name__ == "__main__":
    typer.run(main)
