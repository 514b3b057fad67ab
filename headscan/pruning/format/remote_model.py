"""The classes that a saved pruned model names for remote code, for transformers and for vLLM's transformers backend.

This file is copied next to a pruned model's weights.
"""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import PreTrainedModel

from .pruned_model import CLASSES, PrunedConfig, model_class


class _Remote(PreTrainedModel):
    """Builds pruned models of one auto class for remote code, in place of their own classes.

    vLLM's transformers backend asks the named class whether it can replace the attention, and then builds the model
    without its head through `AutoModel`.
    """

    config_class = PrunedConfig
    _supports_attention_backend = True
    _auto: str

    @classmethod
    def from_pretrained(cls, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        return model_class(type(config), cls._auto).from_pretrained(*args, config=config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Leave the classes as they are: transformers saves them without their code."""

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return model_class(type(config), cls._auto)._from_config(config, **kwargs)


#: The classes by the names that a folder's ``auto_map`` has for them.
REMOTE_CLASSES: dict[str, Any] = {name: type(name, (_Remote,), {"_auto": auto}) for auto, name in CLASSES.items()}
