"""The verb prune."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.catalog import CRITERIA, RANDOM, RANKED_CRITERIA, RECALL_NAMES, SET_METHODS
from headscan.cli.option_parser import UsageError
from headscan.cli.results import Json, Result, arm_row
from headscan.cli.task_options import DemoSize, OptionalTaskOptions, RecallOptions, WholeModelVerb, evaluation_of
from headscan.cli.verb_base import quiet_libraries
from headscan.cluster.placement_base import parse_bytes
from headscan.grid import Unit, parse_head
from headscan.model_spec import ModelSpec
from headscan.options import Group, Needs, Option
from headscan.settings.evaluation_settings import LOSS_LIMITS
from headscan.settings.saving_settings import PRUNE_METHODS, REPAIRS, KvCounts, RecallPrompts
from headscan.store.verdict_limits import MAX_LOSS

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.steps.prune.prune_config import PruneConfig
    from headscan.steps.prune.pruning_units import PruneBudget
    from headscan.steps.prune.run_prune import PruneResult

#: Heads that are named leave nothing to choose.
_CHOSEN = tuple(Needs(key=f"size.{name}", absent=True) for name in ("heads", "mask", "import_heads"))
_JUDGED = Needs(key="skip_verdict", absent=True)
#: Four models answer the demo's questions in half a minute on two cores.
_DEMO = DemoSize(questions=80, recall=40, sequences=128)


@dataclass(frozen=True, kw_only=True)
class _Size:
    share: Annotated[
        float | None,
        Option("share of the heads to remove, for example 0.4", above=0, below=1, one_of="size", required=True),
    ] = None
    shares: Annotated[
        tuple[float, ...],
        Option(
            "comma-separated shares; each gives a model, and common moments are measured once",
            above=0,
            below=1,
            one_of="size",
        ),
    ] = ()
    kv_bytes: Annotated[
        int | None,
        Option(
            "most bytes of one sequence's KV cache, as in 2GiB; needs --at, and removes whole KV groups",
            metavar="BYTES",
            parse=parse_bytes,
            one_of="size",
        ),
    ] = None
    max_loss: Annotated[
        float | None,
        Option(
            "largest divergence of the predictions from the original's on the calibration texts, in nats per token",
            metavar="NATS",
            above=0,
            most=1e3,
            one_of="size",
        ),
    ] = None
    heads: Annotated[
        tuple[tuple[int, int], ...],
        Option("comma-separated heads to remove", metavar="LAYER:HEAD", parse=parse_head, spaces=True, one_of="size"),
    ] = ()
    mask: Annotated[
        str | None, Option("name or id of a mask in the store whose heads are removed", metavar="NAME", one_of="size")
    ] = None
    import_heads: Annotated[
        str | None, Option("JSON list of [layer, head] whose heads are removed", metavar="FILE", one_of="size")
    ] = None
    at: Annotated[int | None, Option("sequence length of --kv-bytes, in tokens", metavar="TOKENS", least=1)] = None

    @property
    def names_heads(self) -> bool:
        return bool(self.heads or self.mask or self.import_heads)

    def budgets(self) -> tuple[PruneBudget, ...]:
        """Return the sizes; empty if heads are named."""
        from headscan.steps.prune.pruning_units import BytesBudget, LossBudget, ShareBudget

        if self.names_heads:
            return ()
        if self.kv_bytes is not None and self.at is not None:
            return (BytesBudget(self.kv_bytes, self.at),)
        if self.max_loss is not None:
            return (LossBudget(self.max_loss),)
        shares = self.shares if self.share is None else (self.share,)
        return tuple(ShareBudget(share) for share in dict.fromkeys(shares))


@dataclass(frozen=True, kw_only=True)
class _Choice:
    method: Annotated[
        tuple[str, ...],
        Option(
            f"comma-separated methods: {RANDOM}; "
            + "; ".join(f"{name}: {CRITERIA[name].removed_first}" for name in SET_METHODS if name != RANDOM)
            + "; or a score or another criterion of a run in the store",
            kind="method",
            names=PRUNE_METHODS,
            needs=_CHOSEN,
        ),
    ] = ("damage",)
    run_id: Annotated[
        str | None,
        Option(
            "first characters of the id of that run (default: the newest of this model)",
            flag="--run",
            needs=(*_CHOSEN, Needs(key="method", values=RANKED_CRITERIA, named="a score")),
        ),
    ] = None
    unit: Annotated[
        Unit | None,
        Option(
            "head: single query heads; group: KV heads with their query heads, which frees KV cache; layer: whole "
            "attentions (default: head; group with --kv-bytes)",
            needs=_CHOSEN,
        ),
    ] = None
    kv_counts: Annotated[
        KvCounts,
        Option(
            "numbers of KV heads that layers keep, with --unit group; divisors: those that a DeciLM folder for vLLM "
            "holds without padding, so that the removed share may be less by up to one step of a layer",
            needs=_CHOSEN,
        ),
    ] = "any"
    tries: Annotated[
        int,
        Option(
            "choices near the best one that are repaired and compared with it, for damage and layer-drop",
            metavar="N",
            least=0,
            needs=(Needs(key="method", values=("damage", "layer-drop")),),
        ),
    ] = 0
    repair: Annotated[
        str,
        Option(
            "projections that are solved again: o output, v value, down the second of the MLP; mean adds the mean "
            "outputs of removed heads instead",
            choices=tuple(REPAIRS),
        ),
    ] = "o+down"
    recall_weight: Annotated[
        float,
        Option(
            f"weight of recall prompts ({RECALL_NAMES}) in choice and repair, next to 1 for the texts; 0 or "
            "--no-recall: texts alone",
            metavar="W",
            least=0,
            most=1e3,
            needs=(Needs(key="recall.asked"),),
        ),
    ] = RecallPrompts.weight
    distill_steps: Annotated[
        int,
        Option(
            "steps of distillation of the repaired projections after the repair",
            flag="--distill",
            metavar="STEPS",
            least=0,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Prune(WholeModelVerb):
    """remove attention heads for good: a smaller model, repaired, saved and judged

        headscan prune demo --share 0.4 --out smaller/
        headscan prune MODEL --share 0.4 --corpus texts/ --tasks mmlu --out smaller/
        headscan prune MODEL --shares 0.1,0.2,0.4 --method damage,output_norm_ln --corpus texts/ --out curve/
        headscan prune MODEL --kv-bytes 1GiB --at 32768 --corpus texts/ --out smaller/

    Heads are chosen by the loss that is left after repair, or by another method. The projections that remain are solved
    again in closed form. The saved model loads in headscan and in transformers. It answers the same questions as the
    original, next to controls of about the same size with the same repair: random heads, and whole attention layers
    dropped.
    """

    common: ClassVar = (
        "MODEL --share --shares --kv-bytes --at --max-loss --method --unit --corpus --tasks --out --store"
    )

    tasks: Annotated[OptionalTaskOptions, Group("tasks", needs=(_JUDGED,))]
    recall: Annotated[RecallOptions, Group("tasks", needs=(replace(_JUDGED, of=("questions",)),))]
    json: Json = False
    size: Annotated[_Size, Group("size")]
    choice: Annotated[_Choice, Group("choice and repair")]
    controls: Annotated[
        int | None,
        Option(
            "number of models with as many random heads removed and the same repair; unless 0, whole attention layers "
            "are dropped for comparison, too (default: 1)",
            metavar="N",
            least=0,
            needs=(_JUDGED,),
        ),
    ] = None
    safe_loss: Annotated[
        float,
        Option(
            "largest increase of the loss of held-out text of a safe model, in nats per token",
            metavar="NATS",
            above=LOSS_LIMITS.above,
            most=LOSS_LIMITS.most,
            needs=(_JUDGED,),
        ),
    ] = MAX_LOSS
    skip_verdict: Annotated[bool, Option("no evaluation, no controls: choose, repair and save only")] = False
    remote_code: Annotated[
        bool, Option("copy the code of pruned models into the folder, for machines without headscan")
    ] = False
    out: Annotated[str, Option("new folder of the model; with several sizes, of their folders", metavar="DIR")]

    def __post_init__(self) -> None:
        size, choice = self.size, self.choice
        if (size.kv_bytes is None) != (size.at is None):
            raise UsageError("--kv-bytes and --at go together: give bytes and the length at which they count")
        if size.kv_bytes is not None and choice.unit == "head":
            raise UsageError("--kv-bytes needs --unit group or layer: single query heads free no KV cache")
        if choice.kv_counts != "any" and self.unit != "group" and not size.names_heads:
            raise UsageError("--kv-counts divisors goes with --unit group: add it, or leave --kv-counts out")
        if choice.tries and size.names_heads and (self.skip_verdict or self.controls == 0):
            raise UsageError("--tries has no effect on named heads without controls: leave it out")
        self.check_texts()

    @property
    def unit(self) -> Unit:
        return self.choice.unit or ("group" if self.size.kv_bytes is not None else "head")

    def run(self) -> Result:
        if self.size.import_heads and not Path(self.size.import_heads).is_file():
            raise UsageError(f"no file {self.size.import_heads}: give a JSON list of [layer, head]")
        if self.size.mask or (not self.size.names_heads and not set(self.choice.method) <= set(SET_METHODS)):
            self.store.check_exists()
        from headscan.jobs import job_functions
        from headscan.runs.model_identity import identify
        from headscan.steps.prune.work_folder import check_place

        check_place(Path(self.out))
        options = self.whole_model_options()
        quiet_libraries()
        spec = self.full_precision()
        options["identity"] = identity = identify(spec)
        with self._config(spec, identity) as config:
            result = job_functions.prune(config, self.store.path, **options)
        return _result(self.store.path, result)

    @contextmanager
    def _config(self, spec: ModelSpec, identity: ModelIdentity) -> Iterator[PruneConfig]:
        """Yield the settings; the demo's task exists inside the context."""
        from headscan.models.model_facts import check_bounds
        from headscan.pruning.head_selection import SelectionConfig
        from headscan.ranking.head_roles import find_mask
        from headscan.runs.head_orders import imported_heads
        from headscan.steps.prune.prune_config import PruneConfig, RepairChoice

        size, choice = self.size, self.choice
        named: dict[str, tuple[tuple[int, int], ...]] = {}
        if size.heads:
            named["heads"] = size.heads
        elif size.mask:
            named["mask"] = find_mask(self.store.open(), size.mask, identity.columns()).heads
        elif size.import_heads:
            named["imported"] = tuple(imported_heads(size.import_heads))
        for heads in named.values():
            check_bounds(spec.config(), heads)
        alone = not self.recall.asked or choice.recall_weight == 0
        with tempfile.TemporaryDirectory() as scratch:
            yield PruneConfig(
                evaluation=replace(evaluation_of(self, spec, Path(scratch), _DEMO), max_loss=self.safe_loss),
                out=self.out,
                budgets=size.budgets(),
                methods=choice.method,
                heads=named,
                texts=self.prune_texts(_DEMO),
                recall_prompts=RecallPrompts(prompts=0) if alone else RecallPrompts(weight=choice.recall_weight),
                unit=self.unit,
                kv_counts=choice.kv_counts,
                selection=SelectionConfig(tries=choice.tries),
                repair=RepairChoice(choice.repair, choice.distill_steps),
                controls=PruneConfig.controls if self.controls is None else self.controls,
                remote_code=self.remote_code,
                skip_verdict=self.skip_verdict,
                run_id=choice.run_id,
            )


def _result(store: str, result: PruneResult) -> Result:
    """Return a row for each pruned model, controls included, with its verdict."""
    from headscan.steps.prune.form_sizes import FormSize, form_sizes

    names = result.names or ("",) * len(result.models)
    verdict = result.verdict
    arms = {} if verdict is None else verdict.by_name
    rows = [
        {
            **asdict(built),
            "folder": None if built.is_control else built.folder,
            "arm": name or None,
            "verdict": arm_row(arms[name]) if name in arms else None,
            "forms": None
            if built.is_control
            else [asdict(each) for each in form_sizes(built.folder, built.costs.after)],
        }
        for built, name in zip(result.models, names, strict=True)
    ]
    facts = {"run_id": None if verdict is None else verdict.run_id, "store": store}
    forms = [
        {"share": f"{100 * built.share:.3g}%", "method": built.method, **FormSize(**form).row()}
        for built, row in zip(result.models, rows, strict=True)
        for form in row["forms"] or ()
    ]
    return Result(rows, lambda: _prune_text(store, result, names, forms), facts)


def _prune_text(store: str, result: PruneResult, names: Sequence[str], forms: Sequence[Mapping[str, str]]) -> str:
    from headscan.export.servable_model import serving_commands
    from headscan.steps.prune.held_out_losses import loss_rows
    from headscan.steps.prune.model_card import cost_rows, model_rows
    from headscan.text_tables import text_table
    from headscan.verdicts.verdict_table import verdict_notes

    parts = [text_table(model_rows(result.models, names, result.verdict))]
    own = [built for built in result.models if not built.is_control]
    parts.append(
        text_table(
            [
                {"share": f"{100 * built.share:.3g}%", "method": built.method, **row}
                for built in own
                for row in loss_rows(built.losses)
            ]
        )
    )
    if len(own) == 1:
        rows = [dict(zip(("", "before", "after"), row, strict=True)) for row in cost_rows(own[0].costs)]
        parts.append(text_table(rows))
    parts.append(text_table(forms))
    if result.verdict is not None:
        outcomes = result.verdict.by_name
        own_arms = [
            outcomes[name]
            for built, name in zip(result.models, names, strict=True)
            if not built.is_control and name in outcomes
        ]
        parts += [verdict_notes(own_arms), f"run {result.verdict.run_id} in {store}"]
    parts.append("\n".join(f"written to {built.folder}" for built in own))
    if result.is_servable:
        last = own[-1]
        commands = serving_commands(str(last.folder), serves_itself=result.has_code and last.has_equal_groups)
        parts.append("for serving engines:\n" + "\n".join(commands))
    return "\n\n".join(parts)
