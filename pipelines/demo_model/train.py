"""Train the demo model, a small Llama-type decoder for Python.

    python pipelines/demo_model/train.py --out DIR [--steps N] [--device cuda]

The recipe makes real attention sinks appear: every training sequence begins with BOS, the learning rate stays high for
most of the run (warm-up, constant, linear decay), and weight decay is on.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from training_files import training_files
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headscan.texts import held_out_files

BOS, EOS = "<|bos|>", "<|eos|>"


@dataclass(frozen=True)
class Recipe:
    """Settings of the training that decide the model."""

    steps: int = 4500
    batch: int = 8
    context: int = 512
    vocabulary: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 688
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    learning_rate: float = 4e-3
    matrix_learning_rate: float = 0.02  # of Muon, for the matrices inside the blocks; 0 uses AdamW
    warmup: int = 100
    decay_share: float = 0.4
    short_share: float = 0.75  # share of the steps on sequences of half the context, which are cheaper
    weight_decay: float = 0.1
    stdlib_epochs: int = 3
    seed: int = 0


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: Iterator[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts BOS before every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, model_max_length=context, add_bos_token=True
    )


def to_sequences(texts: list[str], tokenizer: PreTrainedTokenizerFast, context: int) -> np.ndarray:
    """Cut joined texts into pieces after BOS: uint16 (sequences, context). EOS follows each text."""
    stream: list[int] = []
    backend: Any = tokenizer.backend_tokenizer
    for encoded in backend.encode_batch_fast(texts, add_special_tokens=False):
        stream += [*encoded.ids, tokenizer.eos_token_id]
    rows = len(stream) // (context - 1)
    body = np.asarray(stream[: rows * (context - 1)], dtype=np.uint16).reshape(rows, context - 1)
    return np.concatenate([np.full((rows, 1), tokenizer.bos_token_id, dtype=np.uint16), body], axis=1)


def rate_at(step: int, recipe: Recipe) -> float:
    """Return the share of the full learning rate. It warms up linearly, stays constant, and decays linearly to zero."""
    decay_from = recipe.steps * (1 - recipe.decay_share)
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / max(1.0, recipe.steps - decay_from))


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    embeddings = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" in n]
    groups = [{"params": embeddings, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if recipe.matrix_learning_rate == 0:
        groups.append({"params": matrices, "weight_decay": recipe.weight_decay})
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-10, fused=True)
    ]
    if recipe.matrix_learning_rate:
        optimizers.append(
            torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay, momentum=0.95)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return optimizers


@torch.no_grad()
def validate(model: LlamaForCausalLM, sequences: np.ndarray, device: str) -> dict[str, float]:
    """Return loss (nats per token) and next-token accuracy on held-out modules, and first-token weights."""
    model.eval()
    losses, hits, sinks = [], [], []
    for start in range(0, len(sequences), 8):
        ids = torch.from_numpy(sequences[start : start + 8].astype(np.int64)).to(device)
        logits = model(ids).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
        hits.append((logits.argmax(-1) == ids[:, 1:]).float().mean().item())
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(sequences[:4].astype(np.int64)).to(device)
    for weights in model(ids, output_attentions=True).attentions:
        sinks += weights[..., 0].mean(dim=(0, 2)).tolist()
    model.set_attn_implementation(implementation)
    model.train()
    return {
        "loss": float(np.mean(losses)),
        "accuracy": float(np.mean(hits)),
        "first_token_weight_max": max(sinks),
        "first_token_weight_mean": float(np.mean(sinks)),
    }


@dataclass(frozen=True)
class Data:
    """Training data of a recipe.

    Attributes:
        rows: The sequences of all steps in order, uint16 (steps x batch, context).
        held_out: Sequences of held-out modules (sequences, context).
        files: Number of files of each package.
    """

    tokenizer: PreTrainedTokenizerFast
    rows: np.ndarray
    held_out: np.ndarray
    files: Counter[str]


def prepare(recipe: Recipe) -> Data:
    """Read sources, train the tokenizer, and lay out all steps."""
    rng = np.random.default_rng(recipe.seed)
    files = list(training_files(seed=recipe.seed))
    texts: dict[str, list[str]] = {}
    for package, path in files:
        texts.setdefault(package, []).append(read(path))
    library_texts = texts.pop("stdlib")
    sample = [*library_texts, *(text for group in texts.values() for text in group[:40])]
    tokenizer = train_tokenizer(iter(sample), recipe.vocabulary, recipe.context)
    library = to_sequences(library_texts, tokenizer, recipe.context)
    packages = to_sequences([text for group in texts.values() for text in group], tokenizer, recipe.context)

    needed = recipe.steps * recipe.batch
    epochs = [library[rng.permutation(len(library))] for _ in range(recipe.stdlib_epochs)]
    epochs.append(packages[rng.permutation(len(packages))][: max(0, needed - recipe.stdlib_epochs * len(library))])
    mixed = np.concatenate(epochs)
    order = np.resize(rng.permutation(len(mixed)), needed)
    return Data(
        tokenizer,
        mixed[order],
        to_sequences([read(path) for path in held_out_files()], tokenizer, recipe.context)[::8],
        Counter(package for package, _ in files),
    )


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model of the recipe's shape."""
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    recipe: Recipe, out: Path, *, device: str = "cpu", compile_model: bool = False, save_every: int = 500
) -> None:
    """Train by ``recipe`` and write weights, tokenizer and ``training.json`` to ``out``."""
    torch.manual_seed(recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    data = prepare(recipe)
    model: Any = new_model(recipe, data.tokenizer)
    data.tokenizer.save_pretrained(out)
    print(f"{len(data.rows)} sequences in {data.files.total()} files; {len(data.held_out)} held out", flush=True)
    model.to(device)
    # On a CPU short causal attention is faster as plain bfloat16 matrix products than as a fused call.
    model.set_attn_implementation("eager" if device == "cpu" else "sdpa")
    optimizers = make_optimizers(model, recipe)
    forward = torch.compile(model) if compile_model else model
    history: list[dict[str, float]] = []
    started, recent = time.time(), []
    for step in range(recipe.steps):
        rows = data.rows[step * recipe.batch :][: recipe.batch]
        ids = torch.from_numpy(rows.astype(np.int64)).to(device)
        if step < recipe.short_share * recipe.steps:
            ids = ids.reshape(2 * recipe.batch, -1)
            ids[:, 0] = data.tokenizer.bos_token_id
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * rate_at(step, recipe)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = forward(ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        seconds = time.time() - started
        if (step + 1) % 50 == 0:
            speed = (step + 1) * recipe.batch * recipe.context / seconds
            print(f"step {step + 1} loss {np.mean(recent[-50:]):.3f} tokens/s {speed:.0f}", flush=True)
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            figures = validate(model, data.held_out, device)
            tokens = (step + 1) * recipe.batch * recipe.context
            history.append({"step": step + 1, "tokens": tokens, "train_loss": float(np.mean(recent[-200:])), **figures})
            print(json.dumps(history[-1]), flush=True)
            save(model, recipe, out, history, data.files, seconds)
    if not math.isfinite(history[-1]["loss"]):
        raise SystemExit("training diverged. Lower the learning rate")


def save(
    model: LlamaForCausalLM,
    recipe: Recipe,
    out: Path,
    history: list[dict[str, float]],
    files: Counter[str],
    seconds: float,
) -> None:
    """Write the model in bfloat16 and the facts of its training."""
    weights: Any = LlamaForCausalLM(model.config)
    weights.to(torch.bfloat16)
    weights.load_state_dict(model.state_dict())
    weights.save_pretrained(out)
    facts = {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "files": dict(files),
        "seconds": round(seconds),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "history": history,
    }
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile the model (needs a C++ compiler)")
    parser.add_argument("--save-every", type=int, default=500)
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    out, device, compiled, every = (options.pop(key) for key in ("out", "device", "compile", "save_every"))
    train(Recipe(**options), out, device=device, compile_model=compiled, save_every=every)


if __name__ == "__main__":
    main()
