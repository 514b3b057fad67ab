"""DeciLM folders and GGUF files that headscan wrote, read back as the pruned models that they came from.

Both hold the configuration of their model in addition, a folder in ``config.json``. The weights are those of the folder
or file, without the heads of zeros that fill places of the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headscan.errors import ModelLoadError

#: Key of ``config.json`` that holds the configuration of the model.
RECORD = "headscan_model"
_MODEL_TYPE = "nemotron-nas"


def recorded_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of the model in a DeciLM folder of headscan; None for other models."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("model_type") != _MODEL_TYPE:
        return None
    code = config.get("auto_map")
    # Folders of others bring the code of their models, too.
    if not isinstance(code, dict) or set(code) != {"AutoConfig"}:
        return None
    if RECORD not in config:
        raise ModelLoadError(f"{folder} is a DeciLM folder without the configuration of its model. Export it again")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelLoadError(
            f"{folder} has windows by layer, which only engines apply. Evaluate the plan on the model it was made for"
        )
    record: dict[str, Any] = config[RECORD]
    return record


def write_pruned_folder(folder: Path, target: Path) -> None:
    """Write the model of a DeciLM folder with its tokenizer; raise if a head that fills a place is not zero."""
    import shutil

    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for file in folder.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model") and not file.name.startswith(("config.", "model.")):
            shutil.copyfile(file, target / file.name)
    held: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        held |= load_file(path)
    groups = [block["attention"]["n_heads_in_group"] for block in config["block_configs"]]
    write_pruned_model(folder, target, config[RECORD], held, groups)


def write_pruned_model(
    source: Path, target: Path, record: Mapping[str, Any], held: Mapping[str, Any], groups: Sequence[int | None]
) -> None:
    """Write the model with a recorded configuration into a folder.

    Args:
        source: Path of the model, for errors.
        held: Tensors by Llama's names, with heads of zeros.
        groups: Query heads for each KV head, by layer.
    """
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    from headscan.pruning.format.attention_parts import LayerHeads
    from headscan.pruning.format.pruned_model import heads_of

    (target / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    own = AutoConfig.from_pretrained(target)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(own).state_dict()
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    whole = LayerHeads.all(own.num_attention_heads, own.num_key_value_heads)
    pruned = heads_of(own)

    def own_heads(name: str) -> torch.Tensor:
        """Return a weight or bias of an attention without the heads of zeros."""
        *_, number, _, projection, leaf = name.split(".")
        value, heads = held[name], pruned.get(int(number), whole)
        group = groups[int(number)] or 1
        places = list(range(len(heads.kept_kv)))
        if projection in ("q_proj", "o_proj"):
            index = heads.kv_index
            places = [kv_head * group + index[:at].count(kv_head) for at, kv_head in enumerate(index)]
        dim = 1 if projection == "o_proj" else 0
        if projection == "o_proj" and leaf == "bias":
            return value
        by_head = value.unflatten(dim, (-1, head_dim))
        others = [at for at in range(by_head.shape[dim]) if at not in places]
        if projection == "o_proj" and by_head.index_select(dim, torch.tensor(others, dtype=torch.long)).any():
            raise ModelLoadError(f"{source}: {name} is not 0 where its model has no head. Export the model again")
        return by_head.index_select(dim, torch.tensor(places)).flatten(dim, dim + 1)

    tensors: dict[str, torch.Tensor] = {}
    for name, like in expected.items():
        block, _, part = name.partition(".self_attn.")
        number = int(block.rpartition(".")[2]) if part else -1
        before = f"model.layers.{number - 1}.mlp.down_proj.bias" if number else f"{block}.self_attn.o_proj.bias"
        if name == "lm_head.weight" and own.tie_word_embeddings:
            continue
        if part == "bias":
            # A layer without attention has its bias in the last one before it.
            is_own = before not in expected and before in held
            tensors[name] = held[before] if is_own else torch.zeros(like.shape, dtype=like.dtype)
        elif name.endswith("input_layernorm.weight") and name not in held:
            tensors[name] = torch.ones(like.shape, dtype=like.dtype)  # nothing reads it without attention
        elif name not in held:
            raise ModelLoadError(f"{source} lacks the weight {name}. Copy or export it again")
        else:
            tensors[name] = own_heads(name) if part else held[name]
    save_torch_state_dict(
        {name: each.contiguous() for name, each in tensors.items()}, target, metadata={"format": "pt"}
    )
