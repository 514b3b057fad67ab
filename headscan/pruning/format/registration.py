"""Registration of pruned models with transformers, without importing it.

transformers reads a model type from ``config.json``, and `headscan` registers its own. Importing transformers takes
seconds, so the registration waits until a program does that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MAPPINGS = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Let `AutoConfig` and `AutoModelForCausalLM` load pruned models, at once or when they are imported."""
    if _MAPPINGS in sys.modules:
        _register(sys.modules[_MAPPINGS])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(mappings: ModuleType) -> None:
    # The import is here, because it loads torch.
    from headscan.pruning.format.pruned_model import MODEL_TYPE, PrunedConfig

    mappings.CONFIG_MAPPING.register(MODEL_TYPE, PrunedConfig, exist_ok=True)


class _AfterImport(MetaPathFinder):
    """A finder that registers pruned models after one import of `_MAPPINGS`, and then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MAPPINGS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)
