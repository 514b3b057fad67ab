"""A model that one replica in this process holds whole, as `prune` and `referee` need it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments, device_options, task_options
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.cluster.tasks.pool import Pool
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.pruning.calibration_texts import TextConfig
    from headscan.pipelines.runs.identity import ModelIdentity
    from headscan.pipelines.runs.run_records import RunContext


@dataclass(frozen=True)
class WholeModel:
    """The model and the store that a command line names."""

    options: argparse.Namespace
    spec: ModelSpec
    store: Store
    identity: ModelIdentity

    @classmethod
    def of(cls, options: argparse.Namespace) -> WholeModel:
        """Identify the model; nothing is loaded yet.

        Raises:
            UsageError: The options name several replicas.
        """
        from headscan.pipelines.runs.identity import identify

        if options.ray_address is not None or (options.replicas or 1) > 1:
            raise arguments.UsageError("--ray-address and --replicas have no effect on this verb: leave them out")
        options.replicas = 1
        shared.quiet_libraries()
        if options.model == shared.DEMO_MODEL and options.dtype == "auto":
            options.dtype = "float32"  # half precision is slower on most CPUs, and rounds repaired weights
        spec = shared.model_spec(options)
        return cls(options, spec, shared.open_store(options, writes=True), identify(spec))

    @contextmanager
    def opened(self, texts: TextConfig) -> Iterator[tuple[RunContext, int]]:
        """Yield the model's context and the tokens of a batch.

        Raises:
            UsageError: The placement holds a part of the layers.
        """
        from headscan.pipelines.runs.run_records import RunContext

        place = device_options.placement(self.options, self.spec, tokens=self._tokens(texts), evaluates=True)
        with device_options.open_replicas(self.options, self.spec, place.placement) as pool:
            if pool.staged:
                raise arguments.UsageError(
                    f"--placement {place.placement.name} holds a part of the layers: use whole or sharded"
                )
            yield RunContext(self.identity, pool), place.batch_tokens

    def open_other(self, spec: ModelSpec, texts: TextConfig) -> Pool:
        """Open the pool of a pruned model."""
        return device_options.open_model(self.options, spec, tokens=self._tokens(texts))

    def _tokens(self, texts: TextConfig) -> int:
        return max(task_options.TASK_TOKENS, texts.tokens(self.identity))
