"""What serving engines hold of a study's savings: how heads are removed, the form of plans, what a saving is there, and
the commands that serve its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shlex import join, quote
from typing import Any

from headscan.catalog import DEFAULT_SINK, head_count
from headscan.errors import ExportError
from headscan.export.servable_model import obstacle, serving_commands
from headscan.export.vllm_overrides import ARCHITECTURE, served_architecture, vllm_command
from headscan.grid import HeadGrid, Unit
from headscan.report.answers import Commands
from headscan.runs.run_context import Run
from headscan.settings.saving_settings import ENGINES, Engine, KvCounts
from headscan.steps.prune.form_sizes import form_sizes
from headscan.steps.prune.pruned_arms import BuiltModel
from headscan.steps.prune.pruning_units import all_units, allowed_groups
from headscan.study.study_step import Study, StudyError
from headscan.windows import Window

#: Tokens of a block of vLLM's cache in plans: the smallest on CPUs, whose default is 128, so commands name it. On GPUs
#: the default of 16 divides it.
VLLM_BLOCK = 32
#: Forms of pruned models by engine; transformers reads what headscan saves.
_FORMS = {"vllm": "DeciLM", "llama.cpp": "GGUF"}
#: The savings in words, by their settings.
_SAVINGS = {"window_shares": "windows", "prune_shares": "pruned models"}


def for_engine(config: Study, run: Run) -> Study:
    """Return the settings with an engine and without the savings that it does not serve, which lines name. Raise
    StudyError if these were asked for.
    """
    engine, other = config.engine, ""
    if engine is None:
        unserved = _unserved("vllm", config, run)
        engine = "transformers" if unserved else "vllm"
        other = "".join(f"; vLLM serves no {_SAVINGS[name]}: {why}" for name, why in unserved.items())
    missing = _unserved(engine, config, run)
    for name, why in missing.items():
        needing = (name, "recent", "search") if name == "window_shares" else (name, "unit")
        if given := [each for each in needing if getattr(config, each)]:
            raise StudyError(f"`{given[0]}` has no effect for {ENGINES[engine]}: {why}. Leave it out")
    left_out = "".join(f"; no {_SAVINGS[name]} are tried: {why}" for name, why in missing.items())
    if not any(getattr(config, name) != () for name in ("shares", *(_SAVINGS.keys() - missing.keys()))):
        raise StudyError(f"nothing to study for {ENGINES[engine]}{left_out}. Choose another `engine`, or set `shares`")
    none: dict[str, Any] = dict.fromkeys(missing, ())
    found = replace(config, engine=engine, **none)
    removed = {"head": "single heads", "group": "whole KV groups", "layer": "whole attentions"}[found.unit or "group"]
    kinds = [f"{removed} are removed{', in numbers that vLLM holds' * (kv_counts(found) == 'divisors')}"]
    kinds *= found.prune_shares != ()
    if found.window_shares != () and (block := plan_block(found)):
        kinds.append(f"windows are in blocks of {block} tokens")
    run.say(f"for {ENGINES[engine]}: {'; '.join(kinds) or 'plans by KV head'}{left_out}{other}")
    return found


def _unserved(engine: Engine, config: Study, run: Run) -> dict[str, str]:
    """Return why an engine does not serve a kind of saving that the settings allow, by the name of its shares."""
    found: dict[str, str] = {}
    if engine == "transformers":
        return found
    model, source = run.model.config(), run.model.source
    if config.prune_shares != () and (reason := obstacle(model, source)):
        found["prune_shares"] = reason.partition(". ")[0]
    if config.window_shares == ():
        return found
    assert config.max_tokens is not None
    if engine == "llama.cpp":
        found["window_shares"] = "llama.cpp has no windows by KV head"
    elif Window(DEFAULT_SINK, recent_tokens(config), VLLM_BLOCK).covers >= config.max_tokens:
        found["window_shares"] = f"texts of {config.max_tokens} tokens fit into windows of whole blocks"
    else:
        try:
            served_architecture(model, source)
        except ExportError as reason:
            found["window_shares"] = str(reason).partition(". ")[0]
    return found


def recent_tokens(config: Study) -> int:
    """Return the last tokens of a window of a study with a length of the texts."""
    assert config.max_tokens is not None
    return config.recent or max(8, config.max_tokens // 8 - 4)


def plan_block(config: Study) -> int | None:
    """Return the tokens of a block of a study's plans; None keeps single tokens."""
    return VLLM_BLOCK if config.engine == "vllm" else None


def kv_counts(config: Study) -> KvCounts:
    """Return the numbers of KV heads that the layers of a study's pruned models may have."""
    return "divisors" if config.engine == "vllm" and config.unit in (None, "group") else "any"


def removed_shares(config: Study, grid: HeadGrid, say: Callable[[str], None]) -> tuple[Unit, tuple[float, ...]]:
    """Return what a study removes at once, and its shares, smallest first: those below the smallest removal that
    `kv_counts` allow become that, and of shares that remove as many units, the smallest stays.
    """
    unit: Unit = config.unit or "group"
    units = len(all_units(grid, unit))
    allowed = allowed_groups(grid, kv_counts(config)) or {}
    least = min((step for steps in allowed.values() for step in steps if step), default=1)
    shares: dict[int, float] = {}
    for share in config.prune_shares or ():
        count = head_count(share, units)
        shares.setdefault(max(count, least), share if count >= least else least / units)
    if config.prune_shares and head_count(config.prune_shares[0], units) < least:
        say(f"{ENGINES[config.engine or 'vllm']} holds no model that lacks fewer than {least} of {units} KV groups")
    return unit, tuple(shares.values())


def saved_by(built: BuiltModel, engine: Engine | None) -> tuple[float | None, float]:
    """Return the shares of the KV cache and of the weights that a pruned model saves in the form of an engine; None if
    the size of the cache is unknown.
    """
    costs = built.costs
    form = next((each for each in form_sizes(built.folder, costs.after) if each.form == _FORMS.get(engine or "")), None)
    if form is None or form.kv_heads is None or form.parameters is None:
        left = costs.cache_left
        return None if left is None else 1 - left, 1 - costs.weights_left
    return 1 - form.kv_heads / costs.before.kv_heads, 1 - form.parameters / costs.before.parameters


#: The commands by engine that serve, or use, the file of a saving.
Serving = Callable[[str], Mapping[str, tuple[str, ...]]]


def heads_commands(config: Study, run: Run) -> Serving:
    """Return the commands for a list of heads."""
    words = _commands(config, run)
    smaller = str(Path(config.out) / "smaller")

    def commands(file: str) -> dict[str, tuple[str, ...]]:
        options = (*words.model, *words.own_texts, "--import-heads", file, "--out", smaller)
        return {"headscan": (join(("headscan", "prune", *options)),)}

    return commands


def plan_commands(config: Study, run: Run) -> Serving:
    """Return the commands for a plan."""
    model = join(_commands(config, run).model)

    def commands(file: str) -> dict[str, tuple[str, ...]]:
        plan = quote(file)
        found: dict[str, tuple[str, ...]] = {
            "transformers": (f"headscan generate {model} --plan {plan} --prompt-file PROMPT.txt",)
        }
        if config.engine != "vllm":
            return found
        source, overrides = run.model.folder, str(Path(config.out) / "served.json")
        is_decilm = served_architecture(run.model.config(), source) == ARCHITECTURE
        folder = str(Path(config.out) / "model-served") if is_decilm else source
        export = (f"headscan export decilm {model} --out {quote(folder)}",) * is_decilm
        fields = f"headscan export vllm {model} --plan {plan} --out {quote(overrides)}"
        served = vllm_command(folder, overrides, VLLM_BLOCK, is_decilm=is_decilm)
        return {"vLLM, with the plugin headscan-vllm": (*export, fields, served)} | found

    return commands


def model_commands(config: Study) -> Serving:
    """Return the commands for a pruned model."""

    def commands(file: str) -> dict[str, tuple[str, ...]]:
        program = (
            "import sys, headscan; from transformers import pipeline;"
            ' print(pipeline("text-generation", sys.argv[1])(sys.argv[2])[0]["generated_text"])'
        )
        found = {"transformers": (f"python -c {quote(program)} {quote(file)} PROMPT",)}
        engines = {"vllm": ("vLLM", "llama.cpp"), "llama.cpp": ("llama.cpp",)}.get(config.engine or "", ())
        own = serving_commands(file)
        return {engine: own[engine] for engine in engines} | found

    return commands


def _commands(config: Study, run: Run) -> Commands:
    """Return the words that name the model and the texts."""
    settings = {"model": asdict(run.model), "corpus": asdict(config.texts)}
    return Commands.of({"model": run.identity.name, "config": settings}, run.store.path)
