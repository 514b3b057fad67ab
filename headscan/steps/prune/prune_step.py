"""The step prune: sizes, methods, repair and controls of pruned models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from headscan.catalog import CRITERIA, LAYER_DROP, RANDOM, RANKED_CRITERIA, SET_METHODS
from headscan.cluster.placement_base import parse_bytes
from headscan.errors import PruningError, unknown_name
from headscan.grid import Unit, check_pairs, parse_head
from headscan.options import Count, Group, Option, check_limits, short
from headscan.pruning.selection_settings import SelectionConfig
from headscan.settings.evaluation_settings import LOSS_LIMITS, TASK_TOKENS, RecallQuestions, TaskConfig
from headscan.settings.saving_settings import PRUNE_METHODS, REPAIRS, KvCounts, PruneTexts, RecallPrompts
from headscan.steps.question_step import RECALL_GROUP, QuestionStep
from headscan.steps.results import Result, arm_row
from headscan.store.verdict_limits import MAX_LOSS
from headscan.text_tables import percent

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.steps.prune.pruning_units import PruneBudget
    from headscan.steps.prune.run_prune import PruneResult
    from headscan.store.store import Store

#: Heads that are named leave nothing to choose.
_CHOSEN = "no --heads; no --mask; no --import-heads"
_JUDGED = "no --skip-verdict"


@short
@dataclass(frozen=True)
class RepairChoice:
    """A repair.

    Attributes:
        name: Name in `REPAIRS`, which lists the projections that are solved again.
        distill_steps: Gradient steps after it; 0 omits them.
    """

    name: Annotated[
        str,
        Option(
            "projections that are solved again: o output, v value, down the second of the MLP; mean adds the mean "
            "outputs of removed heads instead",
            flag="--repair",
            names=tuple(REPAIRS),
        ),
    ] = "o+down"
    distill_steps: Annotated[
        int, Option("steps of distillation of the repaired projections after the repair", flag="--distill", least=0)
    ] = 0

    def __post_init__(self) -> None:
        check_limits(self, PruningError)
        if self.distill_steps and not self.targets:
            raise PruningError(
                f"`distill_steps={self.distill_steps}` without a repair (limit 0). Repair a projection, too"
            )

    @property
    def targets(self) -> tuple[Literal["o", "v", "down"], ...]:
        return REPAIRS[self.name]

    @property
    def is_none(self) -> bool:
        return self.name == "none"

    @property
    def words(self) -> str:
        return f"{self.name}, distill {self.distill_steps}" if self.distill_steps else self.name


@short
@dataclass(frozen=True)
class Timing:
    """Timing of prefill and decoding.

    Attributes:
        prompt_tokens: Length of the prompt, at most the model's context.
        rounds: Repetitions, which alternate with the original model; times are their medians.
    """

    prompt_tokens: Count = 512
    new_tokens: Count = 16
    rounds: Count = 5

    def __post_init__(self) -> None:
        check_limits(self, PruningError)


@dataclass(frozen=True)
class WantedModel:
    """A pruned model to build.

    Attributes:
        budget: Size; None removes ``heads``.
        heads: Heads to remove; empty if the method chooses them.
        random_folders: Folders of its controls without random units.
        layers_folder: Folder of its control without whole attention layers; None builds none.
    """

    folder: Path
    method: str
    budget: PruneBudget | None
    heads: tuple[tuple[int, int], ...] = ()
    random_folders: tuple[Path, ...] = ()
    layers_folder: Path | None = None


def _check_heads(field: str, by_name: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Raise if a field is no mapping, and if the value of a name is no list of heads, or empty."""
    if not isinstance(by_name, Mapping):
        raise PruningError(f"`{field}={by_name!r}` is no mapping. Pass (layer, head) pairs by name")
    for name, heads in by_name.items():
        if not isinstance(heads, Sequence):
            raise PruningError(f"`{field}` of {name!r} are {heads!r}. Pass a tuple of (layer, head) pairs")
        if not heads:
            raise PruningError(f"`{field}` of {name!r} are empty (limit 1 head). Name heads, or leave {name!r} out")
        check_pairs(heads)


def _method(name: str) -> str:
    """Return the name of a method, checked."""
    if name not in PRUNE_METHODS:
        raise unknown_name("method", name, PRUNE_METHODS)
    return name


@short
@dataclass(frozen=True)
class Prune(QuestionStep["PruneResult"]):
    """remove attention heads for good: a smaller model, repaired, saved and judged

        headscan prune demo --share 0.4 --out smaller/
        headscan prune MODEL --share 0.4 --corpus texts/ --tasks mmlu --out smaller/
        headscan prune MODEL --shares 0.1,0.2,0.4 --method damage,output_norm_ln --corpus texts/ --out curve/
        headscan prune MODEL --kv-bytes 1GiB --at 32768 --corpus texts/ --out smaller/

    Heads are chosen by the loss that is left after repair, or by another method. The projections that remain are solved
    again in closed form. The saved model loads in headscan and in transformers. It answers the same questions as the
    original, next to controls of about the same size with the same repair: random heads, and whole attention layers
    dropped.

    Attributes:
        recall: Recall questions that judge; None asks none, and chooses and repairs by texts alone.
        text: The held-out text is added; leave it out.
        heads: Heads to remove, instead of a size. ``masks`` names such lists, and one model is built for each.
        methods: Methods that choose heads, of `PRUNE_METHODS` or ``orders``; one model is built for each size and
            method.
        orders: All heads, the least important first, by method; criteria without an entry take the order of a run in
            the store.
        texts: Texts that choose, repair and judge.
        recall_prompts: Recall prompts that choose heads, repair and measure held-out losses, next to the texts.
        unit: Unit of removal; None removes single heads, or groups if a size of the cache is given.
        kv_counts: ``divisors`` leaves each layer a number of KV heads that a DeciLM folder holds without KV heads of
            zeros: a divisor of the query heads, or 0 except in the first layer. The removed share may be smaller than
            the wanted one by less than one step of a layer.
        selection: Effort of the methods ``damage`` and ``layer-drop``.
        controls: Number of random controls of each model: models of about the same size with the same repair, without
            random units. One more control lacks whole attention layers, except with 0.
        timing: How prefill and decoding are timed; None skips it.
        skip_verdict: Judge nothing, and build no controls.
        run_id: First characters of the id of the run whose numbers order heads by a criterion; None uses the newest run
            of this model.
        out: Folder of the model; with several models, of their folders. It becomes a `Path`.

    Raises:
        HeadIndexError: One of ``heads``, ``masks`` or ``orders`` is no pair of indices.
        PruningError: There is nothing to build, a value is out of range, two models have one folder, or a setting has
            no effect.
        UnknownNameError: A method is unknown.
    """

    common: ClassVar = (
        "MODEL --share --shares --kv-bytes --at --max-divergence --method --unit --corpus --tasks --out --store"
    )
    demo_questions: ClassVar = (80, 40)
    error: ClassVar = PruningError

    tasks: Annotated[TaskConfig, Group("tasks", needs=_JUDGED)] = field(default_factory=TaskConfig)
    recall: Annotated[RecallQuestions | None, replace(RECALL_GROUP, needs=_JUDGED, free="recall")] = field(
        default_factory=RecallQuestions
    )
    max_loss: Annotated[
        float,
        Option(
            "largest increase of the loss of held-out text of a safe model, in nats per token",
            above=LOSS_LIMITS.above,
            most=LOSS_LIMITS.most,
            needs=_JUDGED,
        ),
    ] = MAX_LOSS
    out: Annotated[
        str | Path, Option("new folder of the model; with several sizes, of their folders", metavar="DIR")
    ] = field(kw_only=True)
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
            least=1,
        ),
    ] = None
    max_divergence: Annotated[
        float | None,
        Option(
            "largest divergence of the predictions from the original's on the calibration texts, in nats per token",
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
    masks: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict, hash=False)
    at: Annotated[int | None, Option("sequence length of --kv-bytes, in tokens", least=1)] = None
    methods: Annotated[
        tuple[str, ...],
        Option(
            f"comma-separated methods: {RANDOM}; "
            + "; ".join(f"{name}: {CRITERIA[name].removed_first}" for name in SET_METHODS if name != RANDOM)
            + "; or a score or another criterion of a run in the store",
            flag="--method",
            parse=_method,
            needs=_CHOSEN,
        ),
    ] = ("damage",)
    orders: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict, hash=False)
    run_id: Annotated[
        str | None,
        Option(
            "first characters of the id of that run (default: the newest of this model)",
            flag="--run",
            needs=f"{_CHOSEN}; --method {','.join(RANKED_CRITERIA)}",
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
    selection: Annotated[SelectionConfig, Group(needs="--method damage,layer-drop")] = field(
        default_factory=SelectionConfig
    )
    repair: Annotated[RepairChoice, Group()] = field(default_factory=RepairChoice)
    recall_prompts: Annotated[RecallPrompts, Group(needs="--recall")] = field(default_factory=RecallPrompts)
    texts: Annotated[PruneTexts, Group("calibration")] = field(default_factory=PruneTexts)
    controls: Annotated[
        int,
        Option(
            "number of models with as many random heads removed and the same repair; unless 0, whole attention layers "
            "are dropped for comparison, too",
            least=0,
            needs=_JUDGED,
        ),
    ] = 1
    skip_verdict: Annotated[bool, Option("no evaluation, no controls: choose, repair and save only")] = False
    remote_code: Annotated[
        bool, Option("copy the code of pruned models into the folder, for machines without headscan")
    ] = False
    timing: Timing | None = field(default_factory=Timing)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "model", self.model.in_full_precision())
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "texts", self.texts.of_model(self.model, 128))
        if self.recall is None or not self.recall_prompts.weight:
            object.__setattr__(self, "recall_prompts", replace(self.recall_prompts, prompts=0))
        self._check_size()
        self._check_methods()
        if self.text is not None:
            raise PruningError("`text` has no effect on a pruning: leave it out, or set `texts.held_out`")
        # A pruning that builds no controls may also ask for none.
        if self.skip_verdict and self.controls not in (0, Prune.controls):
            raise PruningError(f"`controls={self.controls}` has no effect with `skip_verdict`: leave one of them out")

    def _check_size(self) -> None:
        if (self.kv_bytes is None) != (self.at is None):
            raise PruningError("`kv_bytes` and `at` go together: give bytes and the length at which they count")
        given = [name for name in _SIZES if getattr(self, name) not in (None, (), {})]
        if not given:
            raise PruningError(f"nothing to prune: 0 sizes (limit 1). Set one of {', '.join(_SIZES)}")
        if len(given) > 1:
            raise PruningError(f"`{given[0]}` and `{given[1]}` are two sizes (limit 1). Leave one of them out")
        if self.kv_bytes is not None and self.unit == "head":
            raise PruningError("`kv_bytes` needs `unit` group or layer: single query heads free no KV cache")
        if self.kv_counts != "any" and self.names_heads:
            raise PruningError("`kv_counts` has no effect on named heads: leave it out")
        if self.kv_counts != "any" and self.removed_unit != "group":
            raise PruningError("`kv_counts` divisors goes with `unit` group: add it, or leave `kv_counts` out")
        _check_heads("masks", self.masks)
        _check_heads("orders", self.orders)
        check_pairs(self.heads)

    def _check_methods(self) -> None:
        if self.names_heads and self.methods != Prune.methods:
            raise PruningError("`methods` has no effect on named heads: leave it out")
        # The layers of a control are selected with the same effort.
        has_controls = self.controls and not self.skip_verdict
        unused = asdict(self.selection).items() - asdict(SelectionConfig()).items()
        if self.names_heads and not has_controls and unused:
            raise PruningError(f"`{min(unused)[0]}` has no effect on named heads without controls: leave it out")
        known = (*PRUNE_METHODS, *self.orders)
        for method in self.methods:
            if method not in known:
                raise unknown_name("method", method, known)
        if self.run_id is not None and not set(self.methods) & set(RANKED_CRITERIA):
            raise PruningError("`run_id` has no effect without a criterion of a run in `methods`: leave it out")
        names = self._folder_names
        for name in names:
            if name in ("", "..") or Path(name).name != name or "\\" in name:
                raise PruningError(f"{name!r} names no folder in `out`. Change its name in `masks` or `methods`")
            if names.count(name) > 1:
                raise PruningError(
                    f"{names.count(name)} models have the folder {name!r} (limit 1). Give each size, method and mask"
                    " once"
                )

    @property
    def removed_unit(self) -> Unit:
        """The unit of removal, which is chosen if none is named."""
        return self.unit or ("head" if self.kv_bytes is None else "group")

    @property
    def names_heads(self) -> bool:
        """True if heads are named, so that no method chooses them."""
        return bool(self.heads or self.mask or self.import_heads or self.masks)

    @property
    def head_sets(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Heads to remove by name; ``mask`` and ``import_heads`` are read when the step runs."""
        unread = {"mask": self.mask, "imported": self.import_heads}
        return {
            **({"heads": self.heads} if self.heads else {}),
            **{name: () for name, given in unread.items() if given is not None},
            **self.masks,
        }

    @property
    def budgets(self) -> tuple[PruneBudget, ...]:
        """The sizes; empty if heads are named."""
        from headscan.steps.prune.pruning_units import BytesBudget, LossBudget, ShareBudget

        if self.kv_bytes is not None and self.at is not None:
            return (BytesBudget(self.kv_bytes, self.at),)
        if self.max_divergence is not None:
            return (LossBudget(self.max_divergence),)
        shares = self.shares if self.share is None else (self.share,)
        return tuple(ShareBudget(share) for share in dict.fromkeys(shares))

    @property
    def in_this_process(self) -> bool:
        return True

    def longest(self, identity: ModelIdentity) -> int:
        asked = TASK_TOKENS if self.skip_verdict else super().longest(identity)
        return max(asked, self.texts.longest(identity))

    @property
    def _folder_names(self) -> list[str]:
        return [_folder_name(method, budget) for method, budget, _ in self._sizes]

    @property
    def folders(self) -> tuple[Path, ...]:
        names, out = self._folder_names, Path(self.out)
        return (out,) if len(names) == 1 else tuple(out / name for name in names)

    @property
    def _sizes(self) -> list[tuple[str, PruneBudget | None, tuple[tuple[int, int], ...]]]:
        sizes: list[tuple[str, PruneBudget | None, tuple[tuple[int, int], ...]]] = [
            (method, budget, ()) for budget in self.budgets for method in self.methods
        ]
        return sizes + [(name, None, heads) for name, heads in self.head_sets.items()]

    def wanted(self, scratch: Path) -> tuple[WantedModel, ...]:
        """Return the models to build in the folder ``scratch``, in the order of `folders`."""
        wanted = []
        for number, (method, budget, heads) in enumerate(self._sizes):
            seeds, layers = self._controls(method, budget)
            wanted.append(
                WantedModel(
                    scratch / str(number),
                    method,
                    budget,
                    heads,
                    tuple(scratch / f"{number}-random-{seed}" for seed in range(seeds)),
                    scratch / f"{number}-layers" if layers else None,
                )
            )
        return tuple(wanted)

    def _controls(self, method: str, budget: PruneBudget | None) -> tuple[int, bool]:
        """Return the number of random controls of a model, and True if it has a control without whole layers."""
        if self.skip_verdict or not self.controls:
            return 0, False
        if budget is None:
            return self.controls, True
        # Methods that remove as many units have common controls, built with the first of them that needs each.
        methods = self.methods if budget.same_for_all_methods else (method,)
        first_of_heads = next((each for each in methods if each != LAYER_DROP), None)
        # Whole layers are another number of heads, so their controls are random only without another choice.
        chosen = [each for each in methods if each != RANDOM]
        first_chosen = next((each for each in chosen if each != LAYER_DROP), chosen[0] if chosen else None)
        # Whole layers chosen by damage would be their own control.
        is_control = self.removed_unit == "layer" and "damage" in methods
        return self.controls if method == first_chosen else 0, method == first_of_heads and not is_control

    def check_inputs(self, store: Store) -> None:
        if self.import_heads and not Path(self.import_heads).is_file():
            raise PruningError(f"no file {self.import_heads}: give a JSON list of [layer, head]")
        if self.mask or (not self.names_heads and not set(self.methods) <= {*SET_METHODS, *self.orders}):
            store.runs()  # raises if there is none
        # The imports load torch, which takes seconds.
        from headscan.models.model_facts import check_bounds
        from headscan.steps.prune.work_folder import check_place

        check_bounds(self.model.config(), self.heads)
        check_place(Path(self.out))

    def execute(self, run: Run) -> PruneResult:
        from headscan.steps.prune.run_prune import run_prune

        return run_prune(self, run)

    def shown(self, result: PruneResult, store: Store) -> Result:
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
        facts = {"run_id": None if verdict is None else verdict.run_id, "store": str(store.path)}
        forms = [
            {"share": percent(built.share), "method": built.method, **FormSize(**form).row()}
            for built, row in zip(result.models, rows, strict=True)
            for form in row["forms"] or ()
        ]
        return Result(rows, lambda: _prune_text(str(store.path), result, names, forms), facts)


#: Settings that give a size, or name the heads instead.
_SIZES = ("share", "shares", "kv_bytes", "max_divergence", "heads", "mask", "import_heads", "masks")


def _folder_name(method: str, budget: PruneBudget | None) -> str:
    if budget is None:
        return method
    share = budget.nominal_share
    return f"{method}-{budget.label.replace(' ', '-') if share is None else f'{share:g}'}"


def _prune_text(store: str, result: PruneResult, names: Sequence[str], forms: Sequence[Mapping[str, str]]) -> str:
    from headscan.export.servable_model import command_lines, serving_commands
    from headscan.steps.prune.held_out_losses import loss_rows
    from headscan.steps.prune.model_card import cost_rows, model_rows
    from headscan.text_tables import text_table
    from headscan.verdicts.verdict_table import verdict_notes

    parts = [text_table(model_rows(result.models, names, result.verdict))]
    own = [built for built in result.models if not built.is_control]
    parts.append(
        text_table(
            [
                {"share": percent(built.share), "method": built.method, **row}
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
        parts.append("for serving engines:\n" + "\n".join(command_lines(commands)))
    return "\n\n".join(parts)
