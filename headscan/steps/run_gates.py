"""A gates run: texts -> steps of a fit in a pool -> gates and a mask in the store.

The state of a fit is in the store after every few steps. The same command again goes on from there, with the same gates
in the end, or does nothing if the run is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from headscan.catalog import head_count
from headscan.cluster.pool import refuse_staged
from headscan.errors import GateError
from headscan.gates.fit_gates import FitState, GateFit, Gates, TwoSidedGates, gates_of, is_done, opposite
from headscan.gates.gate_settings import GateFitConfig
from headscan.grid import HeadGrid
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad
from headscan.pruning.calibration import Calibration
from headscan.runs.ledger import Ledger
from headscan.runs.model_identity import ModelIdentity, fingerprint
from headscan.runs.progress import Progress
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import SHORTEST
from headscan.steps.gates import Gates as GatesStep
from headscan.text_tables import counted, percent
from headscan.texts.sequences import read_spread


@dataclass(frozen=True)
class GateItem:
    """Steps of a fit for one replica, from a state (None begins the fit), with gates on the heads of ``site``:
    ``self``, ``encoder`` or ``cross``. The texts are token ids (B, N), padded on the right, and their real tokens (B,).
    """

    name: str
    site: str
    ids: np.ndarray
    lengths: np.ndarray
    config: GateFitConfig
    state: FitState | None
    steps: int


def fit_steps(lm: LoadedModel, item: GateItem) -> FitState:
    """Pool task: return the state after the steps."""
    texts = Calibration(torch.from_numpy(item.ids), torch.from_numpy(item.lengths))
    fit = GateFit(lm.at(item.site), texts, item.config)
    return fit.advance(fit.start() if item.state is None else item.state, item.steps)


#: Steps of one task.
_STEPS = 10


@dataclass(frozen=True)
class GatesResult:
    """A gates run, the name of the mask of the closed heads, and True if the run was complete before."""

    run_id: str
    mask: str
    already_done: bool


def run_gates(config: GatesStep, run: Run) -> GatesResult:
    identity = run.identity
    config = replace(config, fit=replace(config.fit, batch_tokens=run.batch_tokens))
    ids, lengths = _token_batch(config, identity)
    facts = {"site": config.site, "two_sided": config.two_sided, "fit": asdict(config.fit)}
    texts = fingerprint({"ids": ids.tolist(), "lengths": lengths.tolist()})
    run_hash = run.fingerprint({"texts": texts, **facts})
    if (done := run.finished_run("gates", run_hash)) is not None:
        return GatesResult(done, _mask_name(config, done), True)

    refuse_staged(run.pool, "the derivative of a gate")
    grid = run.facts.grid.at(config.site)
    closed = _closed_count(config, grid)
    corpus = config.corpus
    assert corpus is not None
    sizes = {"sequences": len(ids), "max_tokens": config.longest(identity)}
    record = run.record(
        "gates",
        run_hash,
        config={"model": asdict(config.model), "corpus": asdict(corpus), **facts, **sizes},
        corpus=corpus.name,
        corpus_hash=texts,
    )
    with run.ledger(record) as ledger:
        run_id = ledger.run_id
        down, up = _fit(config, run, grid, ids, lengths, ledger)
        run.store.replace_rows("head_gates", run_id, gate_table(run_id, grid, down, up, closed))
        name = _mask_name(config, run_id)
        heads = down.closed(closed)
        if left := down.still_open(heads):
            run.say(
                f"open in the fit (gate above 0.5): {len(left)} of the {counted(closed, 'head')} of the mask, so share"
                f" {config.fit.share:g} is not reached. Raise `steps`, or lower `share`"
            )
        run.store.add_mask(
            name,
            heads,
            site=config.site,
            run_id=run_id,
            criterion="gate",
            share=config.fit.share,
            config={"method": "gates", "penalty": down.penalty},
        )
    return GatesResult(run_id, name, False)


def gate_table(run_id: str, grid: HeadGrid, down: Gates, up: Gates | None, closed: int) -> pa.Table:
    """Return the rows of ``head_gates``; ``closed`` heads are in the mask."""
    masked = set(down.closed(closed))
    classes = None if up is None else TwoSidedGates(down, up).classes()
    rows = [
        {
            "run_id": run_id,
            "site": grid.kind,
            "layer": head.layer,
            "head": head.head,
            "kv_head": grid.site_of(head.layer).kv_head_of[head.head],
            "gate": float(down.values[head]),
            "p_open": float(down.open_probabilities[head]),
            "closed": head in masked,
            "gate_up": None if up is None else float(up.values[head]),
            "p_open_up": None if up is None else float(up.open_probabilities[head]),
            "class": None if classes is None else classes[head],
        }
        for head in grid.heads()
    ]
    return pa.Table.from_pylist(rows)


def _fit(
    config: GatesStep, run: Run, grid: HeadGrid, ids: np.ndarray, lengths: np.ndarray, ledger: Ledger
) -> tuple[Gates, Gates | None]:
    """Fit once or twice; what the ledger has is resumed."""
    dtype = torch.promote_types(getattr(torch, run.facts.dtype), torch.float32)

    # As `fit_two_sided`, but each group of steps is a task of the pool, which may be another process.
    def fitted(name: str, fit: GateFitConfig, advanced: Callable[[int], None]) -> Gates:
        key = "state of a gate fit", name
        known = ledger.get(key)
        state = None if known is None else FitState.of(torch.from_numpy(known), dtype)
        advanced(0 if state is None else state.step)
        while state is None or not is_done(fit, state):
            before = 0 if state is None else state.step
            if before == fit.steps:
                run.say(
                    f"fewer than {percent(fit.share)} of the gates are closed after {before} steps; more steps follow"
                )
            item = GateItem(f"gates ({name})", config.site, ids, lengths, fit, state, _STEPS)
            state = run.pool.one(fit_steps, item)
            ledger.add(key, state.numbers())
            advanced(state.step - before)
        return gates_of(grid, state)

    with Progress("gates", config.fit.steps * (1 + config.two_sided), "step") as progress:
        down = fitted("down", config.fit, progress.update)
        return down, fitted("up", opposite(config.fit, down), progress.update) if config.two_sided else None


def _token_batch(config: GatesStep, identity: ModelIdentity) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (B, N) padded on the right, and lengths (B,)."""
    assert config.corpus is not None
    tokens = config.longest(identity)
    texts = read_spread(config.corpus, identity.tokenizer, tokens, config.sequences, shortest=min(SHORTEST, tokens))
    ids, lengths = pad([text.ids for text in texts])
    return ids.numpy(), lengths.numpy()


def _closed_count(config: GatesStep, grid: HeadGrid) -> int:
    share = config.fit.share or 0.0
    count = head_count(share, grid.total_heads)
    if not share or count >= grid.total_heads:
        raise GateError(
            f"`share={share:g}` closes {count} of {grid.total_heads} heads (limit 1 to {grid.total_heads - 1}). Change"
            " `share`"
        )
    return count


def _mask_name(config: GatesStep, run_id: str) -> str:
    return f"gates-{config.fit.share:g}-{run_id[:6]}"
