"""A plan by KV head as fields of a model's configuration, which the plugin of vLLM in ``serving/vllm`` reads.

The weights stay where they are. A pruned model is served from its DeciLM folder, whose heads of zeros keep as little as
a head of the plan can.
"""

from __future__ import annotations

from shlex import quote
from typing import Any

from headscan.errors import ExportError
from headscan.export.decilm_folder import ARCHITECTURE, decilm_slots
from headscan.export.servable_model import obstacle, own_slots
from headscan.plans import HeadPlan, PlanError, head_windows
from headscan.pruning.format.attention_parts import LayerHeads
from headscan.pruning.format.pruned_model import MODEL_TYPE, heads_of

#: Architectures that the plugin serves, apart from DeciLM; with a plan their names have the prefix.
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PREFIX = "HeadPlan"
#: Version of the fields.
_VERSION = 1
#: Fields of the configuration by which the plugin recognises the model.
_MODEL = ("hidden_size", "intermediate_size", "vocab_size")


def served_architecture(config: Any, source: str) -> str:
    """Return the architecture by which vLLM serves a model of a configuration with a plan: `ARCHITECTURE` if it is
    served from its DeciLM folder. Raise ExportError if the plugin does not serve the model.
    """
    if config.model_type == MODEL_TYPE:
        if reason := obstacle(config, source, "DeciLM folders"):
            raise ExportError(reason)
        return ARCHITECTURE
    architecture: str = (config.architectures or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        raise ExportError(
            f"{source} has architecture {architecture} (limit {', '.join(_ARCHITECTURES)} in vLLM with a plan)."
            " Use the plan with `headscan generate`"
        )
    return architecture


def vllm_command(folder: str, overrides: str, block: int | None, *, is_decilm: bool = False) -> str:
    """Return the command by which vLLM serves the model in a folder with the fields in the file ``overrides``, of a
    plan with ``block``.
    """
    options = " --trust-remote-code" if is_decilm else ""
    if block is not None:
        options += f" --block-size {block}"
    return f'vllm serve {quote(folder)}{options} --hf-overrides "$(cat {quote(overrides)})"'


def vllm_overrides(plan: HeadPlan, config: Any, source: str) -> tuple[dict[str, Any], bool]:
    """Return the fields for ``--hf-overrides`` of a plan for a model with a configuration, and True if the model is
    served from a DeciLM folder.

    Raises:
        ExportError: The plugin does not serve the model.
        PlanError: The plan has no windows, drops heads, or has other heads than the model.
    """
    windows, rows = head_windows(plan)
    architecture = served_architecture(config, source)
    is_decilm = architecture == ARCHITECTURE
    if is_decilm:
        whole = LayerHeads.all(config.num_attention_heads, config.num_key_value_heads)
        pruned = heads_of(config)
        heads = tuple(pruned.get(layer, whole) for layer in range(config.num_hidden_layers))
        own = tuple(len(each.kept_kv) for each in heads)
    else:
        own = (config.num_key_value_heads,) * config.num_hidden_layers
    if tuple(map(len, rows)) != own:
        raise PlanError(f"the plan was made for {plan.model.name} with other KV heads. Make a plan for {source}")
    if is_decilm:
        places = decilm_slots(own_slots(heads), max(each.heads for each in heads))
        # Further KV heads hold zeros, so they keep the narrowest window.
        least = 1 + min(range(len(windows)), key=lambda at: sum(windows[at]))
        rows = [row + [least] * (each.kv_heads - len(row)) for row, each in zip(rows, places, strict=True)]
    fields = {
        "version": _VERSION,
        "model": {name: getattr(config, name) for name in _MODEL},
        "windows": windows,
        "heads": rows,
    }
    if plan.block is not None:
        fields["block"] = plan.block
    if plan.chunk not in (None, 1):  # without chunks each token sees its own window
        fields["chunk"] = plan.chunk
    return {"architectures": [_PREFIX + architecture], "head_plan": fields}, is_decilm
