"""Models whose attention layers have fewer heads: their configuration and their classes.

The configuration holds the original values and, in ``per_layer_config``, the heads that remain. The class builds the
original model and then shrinks its attention modules.

This file is copied next to a pruned model's weights. It imports little, because transformers loads it while it starts.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import init_hf_modules
from transformers.integrations.heterogeneity.configuration_utils import HeterogeneousConfigMixin, _PerLayerConfigView
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from .attention_parts import LayerHeads
from .config_checks import base_of, check_fields, crc32, saved_shapes

MODEL_TYPE = "headscan_pruned"

#: The files of this code, which lie side by side.
_CODE = ("pruned_model.py", "remote_model.py", "pruned_attention.py", "attention_parts.py", "config_checks.py")
#: Auto classes of transformers that load pruned models, and the classes that remote code has for them.
CLASSES = {
    "AutoModel": "PrunedModel",
    "AutoModelForCausalLM": "PrunedForCausalLM",
    "AutoModelForSequenceClassification": "PrunedForSequenceClassification",
    "AutoModelForTokenClassification": "PrunedForTokenClassification",
    "AutoModelForQuestionAnswering": "PrunedForQuestionAnswering",
}
#: Fields of a layer that no original configuration has. transformers wants a value for all layers, too.
_OWN_FIELDS = ("kept_heads", "kept_heads_crc32", "original_heads", "original_kv_heads", "has_added_bias")
#: The part of ``config.json`` for classes of the original model type.
_FOR_ORIGINAL = "original_model"

#: The property of transformers that `_Fields` changes.
_PER_LAYER_CONFIG: Any = vars(HeterogeneousConfigMixin)["per_layer_config"]


class PrunedConfig(PreTrainedConfig):
    """Reads the configuration of a pruned model; the result has a subclass of the original configuration's class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration, and register its class and its models' classes with transformers."""
        base = base_of(config_dict, MODEL_TYPE)
        fields = {name: value for name, value in config_dict.items() if name not in (*_OWN_FIELDS, _FOR_ORIGINAL)}
        for name, own in base.attribute_map.items():
            if own in fields:
                fields.pop(name, None)
        check_fields(fields, base, saved_shapes(kwargs.get("name_or_path")))
        return config_class(base).from_dict(fields, **kwargs)


def auto_map(config: Any) -> dict[str, str]:
    """Return where transformers finds the copied classes for a pruned model's configuration."""
    from transformers.models.auto import modeling_auto

    classes = {"AutoConfig": PrunedConfig.__name__} | {
        auto: name for auto, name in CLASSES.items() if type(config) in getattr(modeling_auto, auto)._model_mapping
    }
    return {auto: f"{Path(__file__).stem}.{name}" for auto, name in classes.items()}


def __getattr__(name: str) -> Any:
    """Return a class that `auto_map` names: its base class does not exist yet when transformers loads this file."""
    if name not in CLASSES.values():
        raise AttributeError(f"module {__name__} has no attribute {name}")
    # transformers copies the files that it finds in statements of this form.
    from .remote_model import REMOTE_CLASSES

    return REMOTE_CLASSES[name]


class _Pickled:
    """Makes instances of a class that belongs to no module known to pickle, which is made again when they are read."""

    #: The arguments of `_empty` for this class.
    _made_for: tuple[str, ...]

    def __reduce__(self) -> Any:
        # Another process finds remote code once transformers has named the folder of its modules there.
        found = _Call(init_hf_modules) if __name__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME) else None
        return itemgetter(1), ((found, _Call(_empty, *self._made_for)),), vars(self)

    def __copy__(self) -> Any:
        copied = _empty(*self._made_for)
        vars(copied).update(vars(self))
        return copied


class _Call:
    """A call whose result pickle reads in place of this object."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def _empty(base_model_type: str, auto: str | None = None) -> Any:
    """Return a configuration without fields, or the model of an auto class without modules."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    base: Any = CONFIG_MAPPING[base_model_type]
    kind = config_class(base)
    if auto is not None:
        kind = model_class(kind, auto)
    return kind.__new__(kind)


class _Fields(_Pickled):
    """Fields of a pruned model's configuration; ``pruned_attention`` names the attention, with {} for the layer."""

    base_model_type: str
    pruned_attention: str
    kept_heads = kept_heads_crc32 = original_heads = original_kv_heads = has_added_bias = None

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields of ``config.json``, also those for readers without this code."""
        whole: Any = self
        of_base: Any = super()
        fields: dict[str, Any] = of_base.to_diff_dict() | dict.fromkeys(_OWN_FIELDS)
        # A stock configuration compares the layers with these, which some architectures name otherwise.
        for name in ("num_hidden_layers", "num_attention_heads"):
            fields.setdefault(name, getattr(whole, name))
        # Classes of the original type, such as LlamaForCausalLM, read this part alone. It stops them: they convert
        # the labels to numbers, and their error shows the sentence.
        code = " or pass `trust_remote_code=True`" if "auto_map" in fields else ""
        sentence = (
            f"{MODEL_TYPE}: the model of this folder is a {self.base_model_type} without some heads. Load it with "
            f"AutoModelForCausalLM after `import headscan`{code}"
        )
        fields[_FOR_ORIGINAL] = {"model_type": self.base_model_type, "id2label": {sentence: ""}}
        return fields

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration, and the code that it names."""
        if getattr(self, "auto_map", None):
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for name in _CODE:
                _copy(Path(__file__).with_name(name), Path(save_directory, name))
        of_base: Any = super()
        of_base.save_pretrained(save_directory, *args, **kwargs)

    @property
    def per_layer_config(self) -> Any:
        whole: Any = self
        return _Layers(whole)

    @per_layer_config.setter
    def per_layer_config(self, value: Any) -> None:
        _PER_LAYER_CONFIG.fset(self, value)
        spec = getattr(self, "_heterogeneity_spec", None)
        if spec is not None:
            # transformers would refuse to read fields that differ in some layers. Here they are the original ones.
            spec.per_layer_attributes = set()


def _copy(file: Path, target: Path) -> None:
    if not (target.exists() and target.samefile(file)):
        shutil.copyfile(file, target)


class _Layers(_PerLayerConfigView):
    """Configurations by layer; heads do not matter for types of layers."""

    def __getitem__(self, at: Any) -> Any:
        return self._config if isinstance(at, str) else super().__getitem__(at)


@cache
def config_class(base: Any) -> Any:
    """Return the configuration class of pruned models of an architecture, known to transformers' auto classes."""
    from transformers.models.auto import modeling_auto

    fields: dict[str, Any] = {"model_type": MODEL_TYPE, "__module__": __name__, "_made_for": (base.model_type,)}
    if isinstance(getattr(base, "head_dim", None), property):
        fields["head_dim"] = _original_head_dim(base.head_dim)
    cls: Any = type("PrunedConfig", (_Fields, base), fields)
    for name in CLASSES:
        auto: Any = getattr(modeling_auto, name)
        if base in auto._model_mapping:
            made = _make_model_class(cls, auto._model_mapping[base], (base.model_type, name))
            if name == "AutoModelForQuestionAnswering":
                # Stock classes for answers have another name for the body, and find none of a decoder's weights.
                body: Any = modeling_auto.AutoModel._model_mapping[base]
                made.base_model_prefix = body.base_model_prefix
            auto.register(cls, made)
    return cls


def _original_head_dim(of_base: Any) -> property:
    """Return a property for the width of a head, which some architectures derive from the number of heads."""

    def head_dim(config: Any) -> int:
        whole = copy.copy(config)
        whole.num_attention_heads = config.original_heads or config.num_attention_heads
        return int(of_base.fget(whole))

    return property(head_dim)


def model_class(config: type[PreTrainedConfig], auto: str = "AutoModelForCausalLM") -> Any:
    """Return the model class, of an auto class, of a class that `config_class` returned."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, auto)._model_mapping[config]


def _make_model_class(config: type[PreTrainedConfig], base: Any, made_for: tuple[str, str]) -> Any:
    from .pruned_attention import shrink_attention

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        # A model without its head has the body's modules at its top.
        body, _, attention = config.pruned_attention.partition(".")
        for layer, heads in heads_of(config).items():
            shrink_attention(getattr(self, body, self), attention, layer, heads)

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError if the paged cache, which has one number of KV heads, does not fit a layer."""
        for layer, heads in heads_of(self.config).items():
            if len(heads.kept_kv) < heads.kv_heads or not heads.groups_are_equal:
                raise ValueError(
                    f"continuous batching needs equal groups and as many KV heads in every layer: layer {layer} has "
                    f"groups of {heads.group_sizes} query heads (limit {heads.kv_heads} equal groups). Use generate()"
                )
        return base.init_continuous_batching(self, *args, **kwargs)

    # vLLM resolves annotations where the class says that it is defined.
    build.__annotations__ = {}
    fields = {
        "__init__": build,
        "init_continuous_batching": init_continuous_batching,
        "config_class": config,
        "_made_for": made_for,
        # transformers reads the source of the class's module, and initialises the buffers of its own models only.
        "__module__": base.__module__,
        # Weights are saved by their names in the model: transformers' conversions to the names of the original
        # checkpoint belong to its model type, so that nothing would convert them back, and they take whole heads.
        "_weight_conversions": [],
    }
    return type(f"Pruned{base.__name__}", (_Pickled, base), fields)


def pruned_config(config: PreTrainedConfig, attention: str, heads: Mapping[int, LayerHeads]) -> Any:
    """Return the configuration of a model with fewer heads; ``attention`` has {} for the layer, as
    ``pruned_attention``.
    """
    fields = config.to_dict()
    if config.model_type != MODEL_TYPE:
        fields["base_model_type"] = config.model_type
        fields.pop("auto_map", None)  # code of the original
    fields |= {"model_type": MODEL_TYPE, "pruned_attention": attention, "architectures": None}
    if getattr(config, "head_dim", None) is None:
        # Engines would divide the hidden size by the heads that remain in a layer.
        fields["head_dim"] = config.hidden_size // config.num_attention_heads
    counts_kv_heads = hasattr(config, "num_key_value_heads")
    fields["per_layer_config"] = {layer: _entry(each, counts_kv_heads) for layer, each in heads.items()}
    pruned = PrunedConfig.from_dict(fields)
    for name in ("_attn_implementation_internal", "_experts_implementation_internal", "_name_or_path"):
        setattr(pruned, name, getattr(config, name, None))
    return pruned


def _entry(heads: LayerHeads, counts_kv_heads: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"num_attention_heads": len(heads.kept)}
    if counts_kv_heads:
        entry["num_key_value_heads"] = len(heads.kept_kv)
    if not heads.kept:
        entry["skip"] = ["attention"]
    return entry | {
        "kept_heads": list(heads.kept),
        "kept_heads_crc32": crc32(heads.kept),
        "original_heads": heads.heads,
        "original_kv_heads": heads.kv_heads,
        "has_added_bias": heads.has_added_bias,
    }


def heads_of(config: Any) -> dict[int, LayerHeads]:
    """Return the heads of the layers that lack some, from a pruned model's configuration."""
    spec = getattr(config, "_heterogeneity_spec", None)
    layers = {} if spec is None else spec.per_layer_overrides
    return {
        layer: LayerHeads(
            tuple(each["kept_heads"]),
            each["original_heads"],
            each["original_kv_heads"],
            each.get("has_added_bias", False),
        )
        for layer, each in sorted(layers.items())
        if "kept_heads" in each
    }
