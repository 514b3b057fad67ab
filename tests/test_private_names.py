"""Private names of libraries that headscan uses: a version without one fails here, with the files that break."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from accelerate import cpu_offload
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.sources import ROOT


def config(**more: Any) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**sizes, vocab_size=8, **more)


def attention_is_set_by_its_field() -> bool:
    found = config()
    found._attn_implementation_internal = "eager"
    return bool(found._attn_implementation == "eager")


def experts_are_set_by_their_field() -> bool:
    found = config()
    found._experts_implementation_internal = "eager"
    return bool(found._experts_implementation == "eager")


def path_is_a_field() -> bool:
    found = config()
    found._name_or_path = "folder"
    return bool(found.name_or_path == "folder")


def layers_have_overrides() -> bool:
    spec = config(per_layer_config={0: {"intermediate_size": 4}})._heterogeneity_spec
    return "intermediate_size" in spec.per_layer_attributes and spec.per_layer_overrides[0]["intermediate_size"] == 4


def views_hold_the_config() -> bool:
    from transformers.integrations.heterogeneity.configuration_utils import _PerLayerConfigView

    found = config()
    return _PerLayerConfigView(found)._config is found


def layers_are_a_property() -> bool:
    from transformers.integrations.heterogeneity.configuration_utils import HeterogeneousConfigMixin

    return bool(vars(HeterogeneousConfigMixin)["per_layer_config"].fset)


def conversions_are_kept_in_the_model() -> bool:
    from transformers import core_model_loading

    return "_weight_conversions" in inspect.getsource(core_model_loading.revert_weight_conversion)


def marked_modules_are_not_initialised() -> bool:
    model = LlamaForCausalLM(config())
    model.lm_head.weight.data.zero_()
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]
    model.initialize_weights()
    kept = not model.lm_head.weight.any()
    model.lm_head._is_hf_initialized = False  # type: ignore[assignment]
    model.lm_head.weight._is_hf_initialized = False  # type: ignore[attr-defined]
    model.initialize_weights()
    return kept and bool(model.lm_head.weight.any())


def missing_files_raise_only_if_asked() -> bool:
    from transformers.utils import cached_file

    return cached_file(str(ROOT / "tests"), "none", _raise_exceptions_for_missing_entries=False) is None


def offloaded_modules_have_a_hook() -> bool:
    hook: Any = cpu_offload(nn.Sequential(nn.Linear(2, 2)))[0]._hf_hook
    return hook.offload and hook.weights_map["bias"].shape == (2,) and hasattr(hook, "execution_device")


def requests_arrive_as_tokens() -> bool:
    from lm_eval.api.model import TemplateLM

    parameters = inspect.signature(TemplateLM._loglikelihood_tokens).parameters
    return list(parameters)[:2] == ["self", "requests"]


def bootstraps_take_a_seed_and_values() -> bool:
    from lm_eval.api.metrics import _bootstrap_internal

    return _bootstrap_internal(sum, 2)((0, [1.0, 1.0])) == [2.0, 2.0]


#: By private name, the check that it does what headscan relies on, and the files that break without it.
CHECKS: dict[str, tuple[Callable[[], bool], tuple[str, ...]]] = {
    "_attn_implementation": (
        attention_is_set_by_its_field,
        ("headscan/attention/cache_attention.py", "headscan/pruning/format/pruned_attention.py"),
    ),
    "_attn_implementation_internal": (
        attention_is_set_by_its_field,
        ("headscan/attention/hooks.py", "headscan/pruning/format/pruned_model.py"),
    ),
    "_can_set_attn_implementation": (
        lambda: LlamaForCausalLM._can_set_attn_implementation(),
        ("headscan/attention/hooks.py",),
    ),
    "_experts_implementation_internal": (experts_are_set_by_their_field, ("headscan/pruning/format/pruned_model.py",)),
    "_name_or_path": (path_is_a_field, ("headscan/pruning/format/pruned_model.py", "headscan/checkpoints/sources.py")),
    "_heterogeneity_spec": (layers_have_overrides, ("headscan/pruning/format/pruned_model.py",)),
    "_PerLayerConfigView": (views_hold_the_config, ("headscan/pruning/format/pruned_model.py",)),
    "per_layer_config": (layers_are_a_property, ("headscan/pruning/format/pruned_model.py",)),
    "_model_mapping": (
        lambda: (
            all(
                type(config()) in auto._model_mapping or auto is AutoModelForMaskedLM
                for auto in (AutoModelForCausalLM, AutoModelForMaskedLM)
            )
            and AutoModelForCausalLM._model_mapping[LlamaConfig] is LlamaForCausalLM
        ),
        (
            "headscan/models/model_facts.py",
            "headscan/pruning/format/pruned_model.py",
            "headscan/pruning/save_model.py",
            "headscan/pruning/slice_heads.py",
        ),
    ),
    "_from_config": (
        lambda: isinstance(LlamaForCausalLM._from_config(config()), PreTrainedModel),
        ("headscan/pruning/format/remote_model.py", "headscan/sizing/model_sizes.py"),
    ),
    "_weight_conversions": (
        conversions_are_kept_in_the_model,
        ("headscan/pruning/format/pruned_model.py", "headscan/pruning/slice_heads.py"),
    ),
    "_is_hf_initialized": (marked_modules_are_not_initialised, ("headscan/layers/lazy_model.py",)),
    "_raise_exceptions_for_missing_entries": (missing_files_raise_only_if_asked, ("headscan/layers/lazy_model.py",)),
    "_hf_hook": (
        offloaded_modules_have_a_hook,
        ("headscan/models/forward_inputs.py", "headscan/pruning/slice_heads.py"),
    ),
    "_loglikelihood_tokens": (requests_arrive_as_tokens, ("headscan/texts/harness.py",)),
    "_bootstrap_internal": (bootstraps_take_a_seed_and_values, ("headscan/texts/harness.py",)),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_private_name_does_what_headscan_relies_on(name: str) -> None:
    holds, files = CHECKS[name]
    try:
        fine = holds()
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, OSError):
        fine = False
    assert fine, f"{name} is gone or has changed in the installed version, so {', '.join(files)} breaks"


@pytest.mark.parametrize("name", CHECKS)
def test_the_files_use_the_private_name(name: str) -> None:
    for file in CHECKS[name][1]:
        assert name in (ROOT / file).read_text("utf-8"), f"{file} no longer uses {name}. Remove it from the list"
