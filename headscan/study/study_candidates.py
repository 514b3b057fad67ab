"""The arms of each kind of saving that a study judges, and the choice of the criterion that ranks ablated heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headscan.ablation.masks import HeadMask
from headscan.catalog import head_count
from headscan.engine.arms import Arm
from headscan.plans import HeadPlan, planned_bytes
from headscan.runs.run_context import Run
from headscan.steps.plan_arms import plan_arms
from headscan.steps.prune.pruned_arms import BuiltModel, pruned_arm
from headscan.steps.run_plan import own_loss, shown_loss
from headscan.store.output_files import write_text
from headscan.store.records import ArmKind
from headscan.store.verdict_limits import MIN_RETAINED
from headscan.study.study_answer import ABLATED, CACHED, REMOVED, Saving, SavingKind
from headscan.study.study_engines import Serving, heads_commands, model_commands, plan_commands, saved_by
from headscan.study.study_step import Study
from headscan.text_tables import percent
from headscan.verdicts.curves import STUDY
from headscan.verdicts.judge import judge
from headscan.verdicts.metrics import read_losses
from headscan.verdicts.ordered_shares import ShareVerdict


@dataclass(frozen=True)
class Candidates:
    """The arms of one kind of saving, from small to large.

    Attributes:
        saving: What is known of them before they are judged.
        write: Returns the file of one of them by its number; the largest safe one is asked for.
        serving: Returns the commands for that file.
        tried: Files of all of them, if there are any before they are judged.
    """

    arms: list[Arm]
    saving: Saving
    write: Callable[[int], str]
    serving: Serving
    tried: tuple[str, ...] = ()

    @property
    def kind(self) -> SavingKind:
        return self.saving.kind

    def saving_of(self, verdicts: Sequence[ShareVerdict]) -> Saving:
        """Return the saving with its verdicts, and with the file of the largest safe share, or of the tried one."""
        saving = replace(self.saving, judged=tuple(verdicts))
        if saving.safe is None:
            return replace(saving, tried_file=next(iter(self.tried), ""))
        file = self.write([arm.name for arm in self.arms].index(saving.safe.name))
        return replace(saving, file=file, commands=self.serving(file))


def ablations(masks: list[Arm], criterion: str, config: Study, run: Run) -> Candidates:
    """Return candidates that ablate heads."""
    file, heads = Path(config.out) / "heads.json", run.facts.grid.total_heads
    saving = Saving(ABLATED, (), _tried(masks), units=heads, criterion=criterion)
    return Candidates(masks, saving, lambda number: write_heads(masks[number], file), heads_commands(config, run))


def caches(
    plans: Sequence[HeadPlan], tokens: int, file: Path, tried: tuple[str, ...], config: Study, run: Run
) -> Candidates:
    """Return candidates that keep less cache, which is counted at ``tokens`` tokens. Those that are shown to lose on
    the held-out prompts of their plans are not asked.
    """
    arms = [plan_arms(plan, ("forward",), 0)[0] for plan in plans]
    layers = plans[0].model.layers
    saved = [1 - planned_bytes(plan, tokens) / plan.model.cache_bytes(tokens, plan.block) for plan in plans]
    saving = Saving(
        CACHED,
        (),
        _tried(arms),
        units=sum(layer.num_key_value_heads for layer in layers),
        length=tokens,
        cache_saved={arm.name: share for arm, share in zip(arms, saved, strict=True)},
        own_losses={arm.name: own_loss(plan) for arm, plan in zip(arms, plans, strict=True)},
        stopped={
            arm.name: why for arm, plan in zip(arms, plans, strict=True) if (why := shown_loss(plan, config.max_loss))
        },
    )
    return Candidates(arms, saving, lambda number: str(plans[number].save(file)), plan_commands(config, run), tried)


def removals(built: Sequence[BuiltModel], config: Study, run: Run) -> Candidates:
    """Return candidates that are pruned models, with the share of the heads that each lacks. Of models without the same
    heads, the first one is a candidate.
    """
    first = {each.removed: each for each in reversed(built)}
    models = [each for each in built if first[each.removed] is each]
    arms = [pruned_arm(each, config.model, run.identity) for each in models]
    heads = run.facts.grid.total_heads
    saved = {arm.name: saved_by(each, config.engine) for arm, each in zip(arms, models, strict=True)}
    saving = Saving(
        REMOVED,
        (),
        tuple((arm.name, len(each.removed) / heads) for arm, each in zip(arms, models, strict=True)),
        units=heads,
        cache_saved={name: cache for name, (cache, _) in saved.items() if cache is not None},
        weights_saved={name: weights for name, (_, weights) in saved.items()},
    )
    folders = tuple(str(each.folder) for each in models)
    return Candidates(arms, saving, lambda number: folders[number], model_commands(config), folders)


def write_heads(arm: Arm, file: Path) -> str:
    """Write the ablated heads as a list that `headscan prune --import-heads` reads, and return its path."""
    assert isinstance(arm.intervention, HeadMask)
    write_text(file, json.dumps([list(head) for head in arm.intervention.heads]) + "\n")
    return str(file)


def mask_arms(criterion: str, order: Sequence[tuple[int, int]], shares: Sequence[float]) -> list[Arm]:
    """Return an arm for each share, which ablates the first heads of an order by a criterion."""
    arms = []
    for share in shares:
        name, heads = f"mask {criterion} {100 * share:g}% of study", HeadMask(order[: head_count(share, len(order))])
        arms.append(Arm(name, ArmKind.MASK, heads, criterion, share, selection=STUDY))
    return arms


def best_criterion(run: Run, run_id: str, arms: Mapping[str, list[Arm]], max_loss: float) -> str:
    """Return the criterion, a key of ``arms``, with most shares below the limits in an evaluation on the choosing
    texts, by the best estimates; the least mean loss breaks ties.
    """
    outcomes, losses = judge(run.store, run_id).by_name, read_losses(run.store, run_id)
    ranks = {}
    for criterion, of_one in arms.items():
        kept = 0
        for arm in of_one:
            recall = [each.paired.retained for each in outcomes[arm.name].judged_recall]
            lost = any(each is not None and each.value < MIN_RETAINED for each in recall)
            if lost or losses[arm.name].difference > max_loss:
                break
            kept += 1
        mean = sum(losses[arm.name].difference for arm in of_one) / len(of_one)
        ranks[criterion] = (-kept, mean)
        listed = ", ".join(f"{percent(arm.share)} {losses[arm.name].difference:+.3f}" for arm in of_one)
        run.say(f"{criterion}: loss {listed} nats per token; {kept} of {len(of_one)} shares keep loss and recall")
    best = min(ranks, key=lambda name: ranks[name])
    run.say(f"{best} ranks the heads")
    return best


def _tried(arms: Sequence[Arm]) -> tuple[tuple[str, float], ...]:
    """Return the names and nominal shares of arms."""
    return tuple((arm.name, arm.share or 0.0) for arm in arms)
