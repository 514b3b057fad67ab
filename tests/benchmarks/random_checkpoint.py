"""Checkpoints of Llama's shape with random weights, of any size, for streaming.

    python -m tests.benchmarks.random_checkpoint FOLDER [--layers 28 --hidden 1536 --mlp 6144 --dtype float32]

They are written layer by layer, one file each, so that no more than a layer is in memory. The tokenizer beside them is
the demo model's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from headscan.checkpoints.sources import load_tokenizer
from headscan.demo import MODEL_FOLDER
from headscan.loading import check_dtype

#: Context of these models, in tokens.
_CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    """A model's size: layers, width of the hidden states and of the MLP, heads; 1B parameters as it is.

    Attributes:
        vocabulary: Tokens the model knows; at least as many as the tokenizer.
    """

    layers: int = 28
    hidden: int = 1536
    mlp: int = 6144
    heads: int = 12
    kv_heads: int = 4
    vocabulary: int = 8192

    def config(self, dtype: torch.dtype) -> LlamaConfig:
        """The configuration of such a model, its head a weight of its own."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=_CONTEXT,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
            dtype=dtype,
        )


def make_checkpoint(folder: Path, shape: Shape, dtype: str = "float32", seed: int = 0) -> int:
    """Write a checkpoint; the bytes of its weights.

    Raises:
        ModelLoadError: There is no such dtype.
    """
    torch_dtype = check_dtype(dtype)
    if not isinstance(torch_dtype, torch.dtype):
        torch_dtype = torch.float32
    folder.mkdir(parents=True, exist_ok=True)
    shape.config(torch_dtype).save_pretrained(folder)
    tokenizer = load_tokenizer(str(MODEL_FOLDER))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    total, index = 0, {}
    for number, sizes in enumerate(_files(shape)):
        name = f"model-{number:05}-of-{shape.layers + 2:05}.safetensors"
        tensors = {weight: _random(size, torch_dtype, generator) for weight, size in sizes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        index.update(dict.fromkeys(tensors, name))
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
    return total


def _files(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Of each file, the shapes of its tensors."""
    E, M, K = shape.hidden, shape.mlp, shape.kv_heads * shape.hidden // shape.heads
    yield {"model.embed_tokens.weight": (shape.vocabulary, E)}
    for layer in range(shape.layers):
        sizes = {
            "self_attn.q_proj": (E, E),
            "self_attn.k_proj": (K, E),
            "self_attn.v_proj": (K, E),
            "self_attn.o_proj": (E, E),
            "mlp.gate_proj": (M, E),
            "mlp.up_proj": (M, E),
            "mlp.down_proj": (E, M),
            "input_layernorm": (E,),
            "post_attention_layernorm": (E,),
        }
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}
    yield {"model.norm.weight": (E,), "lm_head.weight": (shape.vocabulary, E)}


def _random(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    return torch.empty(size, dtype=dtype).normal_(0.0, size[-1] ** -0.5, generator=generator)


def shape_options(parser: argparse.ArgumentParser) -> None:
    """Options for a `Shape`."""
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the requested `Shape`."""
    return Shape(**{name: getattr(options, name) for name in vars(Shape())})


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a checkpoint and print its size."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.random_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    shape_options(parser)
    options = parser.parse_args(arguments)
    total = make_checkpoint(options.folder, shape_of(options), options.dtype)
    print(f"{options.folder}: {total / 2**30:.2f} GiB of weights")


if __name__ == "__main__":
    main()
