"""Effects of the heads of every site on labelled examples: one ablated, or all others of its layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headscan.analysis.effects.head_effects import HeadEffect, record_effects
from headscan.analysis.schema.effect_tables import EACH
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.pipelines.ablate_labelled.run_arms import LabelledConfig, LabelledRun
from headscan.pipelines.ablate_labelled.site_arms import WITHOUT_ABLATION, single_arms
from headscan.pipelines.labelled.labelled_texts import LabelledTexts, read_labelled
from headscan.pipelines.runs.identity import identify
from headscan.pipelines.runs.run_context import RunContext


def labelled_effects(
    config: LabelledConfig,
    store: Store,
    pool: Pool,
    modes: Sequence[str] = (EACH,),
    *,
    context: RunContext | None = None,
    texts: LabelledTexts | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, list[HeadEffect]]:
    """Measure the effect of every head of every site, and record the table in the store.

    Args:
        modes: ``each``: one head is ablated; ``all_but_one``: all other heads of its layer.
        context: Identity and facts of the model; None computes them.
        texts: The examples; None reads the file.
        resume_anyway: Resume even if the software or the device changed; both are recorded.

    Returns:
        The id of the run, and its effects by mode, site, layer and head.

    Raises:
        ExampleError: The file cannot be read, or a label is no class of the model.
        InterventionError: The targets do not have the metric.
        HeadscanError: The run fails; finished arms stay in the store.
    """
    context = RunContext(identify(config.model), pool) if context is None else context
    if texts is None:
        texts = read_labelled(config.data, config.model, context.identity, config.max_tokens)
    run = LabelledRun(config, texts, texts.texts, store, pool, context, {}, resume_anyway, say)
    arms = [arm for mode in modes for arm in single_arms(context.facts.grid, mode)]
    say(f"{len(arms) + 1} arms: the baseline and {len(arms)} sets of heads, on {len(texts.texts)} examples")
    with run.opened([arm.name for arm in (WITHOUT_ABLATION, *arms)]) as run_id:
        run.answer([WITHOUT_ABLATION, *arms])
        found = record_effects(store, run_id)
    return run_id, found
