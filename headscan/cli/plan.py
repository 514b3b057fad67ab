"""The verb plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from json import loads
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.cli.option_parser import Given, UsageError, check_used
from headscan.cli.results import Json, Result
from headscan.cli.verb_base import CORPORA, CorpusOptions, Devices, OptionalModelVerb, RunVerb, say_run
from headscan.cluster.placement_base import parse_bytes
from headscan.model_spec import ModelSpec
from headscan.options import SEEDS, Group, Option
from headscan.settings.evaluation_settings import RESUME_ANYWAY
from headscan.settings.saving_settings import PlanConfig

if TYPE_CHECKING:
    from headscan.plans import BudgetRequest, HeadPlan

Method = Literal["measured", "distant_mass", "retrieval_score", "imported", "random"]
#: Share of the candidates that get a window if no budget is given.
_WINDOW_SHARE = 0.5
_OF_STORE = ("distant_mass", "retrieval_score", "imported", "random")
_MEASURED = ("measured",)


@dataclass(frozen=True, kw_only=True)
class _BudgetOptions:
    window_share: Annotated[
        float | None,
        Option(
            "share of the candidates (KV heads that may get a window) that keep only a window (default: "
            f"{_WINDOW_SHARE:g}, or the pattern's own number)",
            above=0,
            most=1,
            one_of="budget",
        ),
    ] = None
    kv_bytes: Annotated[
        int | None,
        Option(
            "most bytes of one sequence's KV cache, as in 2GiB", metavar="BYTES", parse=parse_bytes, one_of="budget"
        ),
    ] = None
    max_loss: Annotated[
        float | None,
        Option(
            "largest loss increase of method measured on the prompts that rank the heads, in nats per token, for text "
            "and for each recall task",
            metavar="NATS",
            above=0,
            most=1e3,
            one_of="budget",
            only=_MEASURED,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _MeasuredOptions(CorpusOptions):
    name: Annotated[str | None, Option(CORPORA, flag="--corpus")] = None
    settings: Annotated[Given[PlanConfig], Group()]


@dataclass(frozen=True, kw_only=True)
class Plan(OptionalModelVerb, RunVerb):
    """write head_plan.json: which KV heads keep the whole cache, and which only a window

        headscan plan --store s.duckdb --window-share 0.5
        headscan plan MODEL --method measured --corpus texts/ --max-loss 0.01
        headscan plan --method retrieval_score --kv-bytes 2GiB --at 32768
        headscan plan --method imported --pattern pattern/
        headscan plan MODEL --method measured --corpus texts/ --unit layer --sink 0
        headscan plan --store s.duckdb --window-share 0.5 --block 16 --chunk 512

    Method measured needs the model and no scan: it measures how much loss a window on each KV head or layer adds, and
    keeps it in the store, so that the same command resumes. `headscan export` writes the plan for KV-cache tools, and a
    plan by layer for serving engines.
    """

    common: ClassVar = (
        "MODEL --method --unit --window-share --kv-bytes --at --recent --corpus --sequences --confirm --out --store"
    )

    loading: Annotated[Given[ModelSpec], Group("model", _MEASURED)]
    devices: Annotated[Devices, Group("devices", _MEASURED)]
    resume_anyway: Annotated[bool, replace(RESUME_ANYWAY, only=_MEASURED)] = False
    json: Json = False
    run_id: Annotated[
        str | None,
        Option(
            "first characters of the id of a scan, or of a probe for retrieval_score (default: the newest one)",
            flag="--run",
            only=_OF_STORE,
        ),
    ] = None
    method: Annotated[Method, Option("method that orders the KV heads")] = "distant_mass"
    unit: Annotated[
        Literal["head", "layer"],
        Option("what gets a window as a whole: one KV head, or all KV heads of a layer, as serving engines hold them"),
    ] = "head"
    budget: Annotated[_BudgetOptions, Group("budget")]
    at: Annotated[int | None, Option("sequence length of --kv-bytes, in tokens", metavar="TOKENS", least=1)] = None
    sink: Annotated[
        int | None,
        Option(f"number of first tokens that a window head keeps (default: {DEFAULT_SINK}, or the pattern's)", least=0),
    ] = None
    recent: Annotated[
        tuple[int, ...],
        Option(
            "number of last tokens that a window head keeps; of comma-separated widths, method measured chooses one "
            f"for each head (default: {DEFAULT_RECENT}, or the pattern's)",
            least=1,
        ),
    ] = ()
    block: Annotated[
        int | None,
        Option(
            "tokens of a block of the serving engine's KV cache; windows are kept in whole blocks (default: single "
            "tokens)",
            metavar="TOKENS",
            least=1,
        ),
    ] = None
    chunk: Annotated[
        int | None,
        Option(
            "tokens that see the window of the first of them, a multiple of the block (default: each token sees its "
            "own window)",
            metavar="TOKENS",
            least=1,
        ),
    ] = None
    pattern: Annotated[
        str | None,
        Option("pattern of method imported: folder or file of DuoAttention, RLKV, PruLong or HeadKV", metavar="PATH"),
    ] = None
    inverted: Annotated[
        bool | None,
        Option(
            "low numbers of the pattern keep the full cache (default: checked against its stated sparsity)",
            only=("imported",),
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "seed of method random, and of the recall prompts of method measured (default: 0)",
            least=0,
            below=SEEDS,
            only=("measured", "random"),
        ),
    ] = None
    measured: Annotated[_MeasuredOptions, Group("method measured", _MEASURED)]
    out: Annotated[str, Option("output file")] = "head_plan.json"

    def __post_init__(self) -> None:
        measured, corpus = self.method == "measured", self.measured.name is not None
        if measured != (self.model is not None):
            raise UsageError("--method measured and MODEL go together: give both or neither")
        if measured != (corpus or (measured and self.is_demo)):
            raise UsageError("--method measured and --corpus go together: give both or neither")
        if not measured and len(self.recent) > 1:
            raise UsageError("--recent with several widths needs --method measured: give one width")
        if (self.budget.kv_bytes is None) != (self.at is None):
            raise UsageError("--kv-bytes and --at go together: give bytes and the length at which they count")
        if (self.method == "imported") != (self.pattern is not None):
            raise UsageError("--method imported and --pattern go together: give both or neither")
        check_used(self, self.method, f"--method {self.method}")

    def run(self) -> Result:
        plan = self._measured() if self.method == "measured" else self._from_store()
        plan.save(self.out)
        facts = {"file": self.out, "model": plan.model.name, "budget": plan.budget, "notes": plan.notes}
        rows = loads(plan.to_json())["heads"]
        return Result(rows, lambda: "\n".join([*plan.summary(), f"written to {self.out}"]), facts)

    @property
    def _granularity(self) -> Literal["kv_head", "layer"]:
        return "layer" if self.unit == "layer" else "kv_head"

    def _from_store(self) -> HeadPlan:
        from headscan.plans import make_plan, read_pattern

        pattern = None if self.pattern is None else read_pattern(self.pattern, inverted=self.inverted)
        store = self.store.open()
        with store.reading():
            run = store.resolve_run(self.run_id, "probe" if self.method == "retrieval_score" else "scan")
            plan = make_plan(
                store,
                run["run_id"],
                method=self.method,
                budget=self._budget(),
                sink=self.sink,
                recent=self.recent[0] if self.recent else None,
                pattern=pattern,
                seed=self.seed or 0,
                granularity=self._granularity,
                block=self.block,
                chunk=self.chunk,
            )
        say_run(run)
        return plan

    def _measured(self) -> HeadPlan:
        from headscan.jobs import job_functions
        from headscan.plans import LossLimit

        corpus = self.measured.required(self)
        spec, identity = self.identified()
        given = {"sink": self.sink, "recents": self.recent or None, "seed": self.seed}
        given |= {"block": self.block, "chunk": self.chunk}
        config = self.measured.settings.build(
            model=spec,
            corpus=corpus,
            granularity=self._granularity,
            **{name: value for name, value in given.items() if value is not None},
        )
        budget = self._budget() if self.budget.max_loss is None else LossLimit(self.budget.max_loss)
        assert budget is not None
        return job_functions.plan(config, self.store.path, budget, **self.job_options(identity))

    def _budget(self) -> BudgetRequest | None:
        """Return the budget; None for the pattern's own."""
        from headscan.plans import KVBytes, WindowShare

        if self.budget.kv_bytes is not None and self.at is not None:
            return KVBytes(self.budget.kv_bytes, self.at)
        share = self.budget.window_share
        if share is None and self.pattern is not None:
            return None
        return WindowShare(_WINDOW_SHARE if share is None else share)
