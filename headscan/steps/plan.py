"""The step plan: damages of windows that are measured, or numbers of a run in the store, make a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Unpack

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK, RECALL_NAMES
from headscan.cluster.placement_base import parse_bytes
from headscan.model_spec import ModelSpec
from headscan.options import LOCK_TIMEOUT, SEEDS, Group, Limits, Option, check_limits, short
from headscan.settings.corpus_settings import DEMO_CORPUS, CorpusSpec, longest_text
from headscan.steps.results import Result, run_line
from headscan.steps.step import Step
from headscan.text_tables import say
from headscan.windows import Window

if TYPE_CHECKING:
    from headscan.plans import BudgetRequest, HeadPlan, LossLimit
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import ModelContext
    from headscan.steps.open_run import JobOptions
    from headscan.store.store import Store

Method = Literal["measured", "distant_mass", "retrieval_score", "imported", "random"]
#: Share of the candidates that get a window if no budget is given.
_WINDOW_SHARE = 0.5
#: Longest prompts of a damage measurement by default, in tokens.
PLAN_TOKENS = 1024
_OF_STORE = "--method distant_mass,retrieval_score,imported,random"
_MEASURED = "--method measured"


@short
@dataclass(frozen=True)
class Plan(Step["HeadPlan"]):
    """write head_plan.json: which KV heads keep the whole cache, and which only a window

        headscan plan MODEL --corpus texts/
        headscan plan MODEL --corpus texts/ --max-loss 0.01
        headscan plan MODEL --corpus texts/ --unit layer --sink 0
        headscan plan MODEL --corpus texts/ --window-share 0.5 --block 16 --chunk 512
        headscan plan --method retrieval_score --kv-bytes 2GiB --at 32768 --store s.duckdb
        headscan plan --method imported --pattern pattern/ --store s.duckdb

    Method measured needs the model and no scan: it measures how much loss a window on each KV head or layer adds, and
    keeps it in the store, so that the same command resumes. The other methods read a scan or a probe in the store and
    measure no loss. `headscan export` writes the plan for KV-cache tools, and a plan by layer for serving engines.

    Attributes:
        model: Model of method measured; None for the other methods.
        corpus: Ordinary text of method measured.
        sink: First tokens of a window.
        recent: Widths of recent tokens; each KV head gets the narrowest that costs hardly more than the widest. Empty
            uses 256, and at most a quarter of a text with method measured, so that windows of short texts are measured.
        gates: Values of the gates of `kv_damages_by_sequence`.
        block: Tokens of a block of the serving engine, as in a `HeadPlan`; windows are measured in whole blocks. None
            keeps single tokens.
        chunk: Tokens that see the same window, as in a `HeadPlan`; only the finished plan is measured with it, because
            it widens windows. None gives each token its own.
        out: File of the plan; None writes none.

    Raises:
        PlanError: A number is out of range, or settings do not go together.
    """

    common: ClassVar = (
        "MODEL --method --unit --window-share --kv-bytes --at --recent --corpus --sequences --search --out --store"
    )
    of_model: ClassVar = _MEASURED
    keeps_rows: ClassVar = False
    evaluates: ClassVar = True

    model: Annotated[ModelSpec | None, Group("model", _MEASURED)] = None  # type: ignore[assignment]
    run_id: Annotated[
        str | None,
        Option(
            "first characters of the id of a scan, or of a probe for retrieval_score (default: the newest one)",
            flag="--run",
            needs=_OF_STORE,
        ),
    ] = None
    method: Annotated[Method, Option("method that orders the KV heads")] = "measured"
    unit: Annotated[
        Literal["head", "layer"],
        Option("what gets a window as a whole: one KV head, or all KV heads of a layer, as serving engines hold them"),
    ] = "head"
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
            above=0,
            most=1e3,
            one_of="budget",
            needs=_MEASURED,
        ),
    ] = None
    at: Annotated[int | None, Option("sequence length of --kv-bytes, in tokens", least=1)] = None
    sink: Annotated[
        int | None,
        Option(f"number of first tokens that a window head keeps (default: {DEFAULT_SINK}, or the pattern's)", least=0),
    ] = None
    recent: Annotated[
        tuple[int, ...],
        Option(
            "number of last tokens that a window head keeps; of comma-separated widths, method measured chooses one "
            f"for each head (default: {DEFAULT_RECENT}, and at most a quarter of --max-tokens with method measured; or "
            "the pattern's)",
            least=1,
        ),
    ] = ()
    block: Annotated[
        int | None,
        Option(
            "tokens of a block of the serving engine's KV cache; windows are kept in whole blocks (default: single "
            "tokens)",
            least=1,
        ),
    ] = None
    chunk: Annotated[
        int | None,
        Option(
            "tokens that see the window of the first of them, a multiple of the block (default: each token sees its "
            "own window)",
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
            needs="--method imported",
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            "seed of method random, and of the recall prompts of method measured",
            least=0,
            below=SEEDS,
            needs="--method measured,random",
        ),
    ] = 0
    corpus: Annotated[CorpusSpec | None, Group("method measured", _MEASURED)] = None
    max_tokens: Annotated[
        int | None,
        Option(
            f"length of texts and recall prompts in tokens (default: the model's context, at most {PLAN_TOKENS})",
            least=1,
            needs=_MEASURED,
        ),
    ] = None
    sequences: Annotated[
        int, Option("number of texts; one half is held out to measure the plan", least=2, needs=_MEASURED)
    ] = 16
    recall_prompts: Annotated[
        int,
        Option(
            f"number of prompts of each recall task ({RECALL_NAMES}), a multiple of 8; 0 measures text only",
            least=0,
            multiple=8,
            needs=_MEASURED,
        ),
    ] = 8
    gates: Annotated[tuple[float, ...], Limits(least=0, most=1)] = (0.5,)
    search: Annotated[
        bool,
        Option(
            "choose the KV heads or layers near the budget's edge by their loss with real window masks", needs=_MEASURED
        ),
    ] = True
    out: Annotated[str | Path | None, Option("output file")] = "head_plan.json"

    def __post_init__(self) -> None:
        from headscan.plans import PlanError, check_chunk

        check_limits(self, PlanError)
        check_chunk(self.chunk, self.block)
        measured = self.method == "measured"
        if (self.method == "imported") != (self.pattern is not None):
            raise PlanError("`method` imported and `pattern` go together: give both or neither")
        if measured and self.model is None:
            raise PlanError(
                "`method=measured` needs a model, and texts as `corpus`. Give both, or choose `method` distant_mass,"
                " whose scores are those of a scan in the store"
            )
        if measured and self.corpus is None and self.model is not None:
            if not self.model.is_demo:
                raise PlanError("`method=measured` measures windows on texts. Name them as `corpus`")
            object.__setattr__(self, "corpus", CorpusSpec(DEMO_CORPUS))
        for name in ("model", "corpus"):
            if not measured and getattr(self, name) is not None:
                raise PlanError(f"`{name}` has no effect with `method={self.method}`: leave it out")
        if not measured and len(self.recent) > 1:
            raise PlanError("`recent` with several widths needs `method` measured: give one width")
        if (self.kv_bytes is None) != (self.at is None):
            raise PlanError("`kv_bytes` and `at` go together: give bytes and the length at which they count")
        if not self.gates:
            raise PlanError("`gates` is empty (limit 1 value). Set `gates`")

    @property
    def windows(self) -> tuple[Window, ...]:
        """Windows of method measured, narrowest first."""
        sink = DEFAULT_SINK if self.sink is None else self.sink
        return tuple(Window(sink, recent, self.block or 1) for recent in sorted(set(self.recent or (DEFAULT_RECENT,))))

    def with_widths(self, identity: ModelIdentity) -> Plan:
        """Return the settings with the width of method measured, if none is given, for the lengths of a model."""
        if self.recent:
            return self
        return replace(self, recent=(min(DEFAULT_RECENT, max(1, self.longest(identity) // 4)),))

    @property
    def granularity(self) -> Literal["kv_head", "layer"]:
        return "layer" if self.unit == "layer" else "kv_head"

    @property
    def unit_names(self) -> str:
        """What gets a window, in words."""
        return "layers" if self.unit == "layer" else "KV heads"

    @property
    def budget(self) -> BudgetRequest | LossLimit | None:
        """The budget; None for the pattern's own."""
        from headscan.plans import KVBytes, LossLimit, WindowShare

        if self.max_loss is not None:
            return LossLimit(self.max_loss)
        if self.kv_bytes is not None and self.at is not None:
            return KVBytes(self.kv_bytes, self.at)
        if self.window_share is None and self.pattern is not None:
            return None
        return WindowShare(_WINDOW_SHARE if self.window_share is None else self.window_share)

    def longest(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens, PLAN_TOKENS)

    def run(self, store: str | Path | None, **options: Unpack[JobOptions]) -> HeadPlan:
        """Make the plan, and write it.

        Args:
            store: DuckDB file that keeps the damages of method measured, so that the same call resumes (None keeps
                nothing), and that has the run of the other methods.
            options: See `JobOptions`.
        """
        from headscan.plans import PlanError
        from headscan.store.parquet_store import store_at

        if self.method != "measured":
            if store is None:
                raise PlanError(f"`method={self.method}` reads a run: no store. Give `store`")
            report = options.get("say", say)
            plan = self._from_store(
                store_at(store, lock_timeout=options.get("lock_timeout", LOCK_TIMEOUT), on_wait=report), report
            )
        else:
            plan = super().run(store, **options)
        if self.out is not None:
            plan.save(self.out)
        return plan

    def execute(self, run: ModelContext) -> HeadPlan:
        from headscan.steps.run_plan import run_plan

        budget = self.budget
        assert budget is not None
        return run_plan(self, run, budget)

    def _from_store(self, store: Store, report: Callable[[str], None]) -> HeadPlan:
        from headscan.plans import LossLimit, make_plan, read_pattern

        pattern = None if self.pattern is None else read_pattern(self.pattern, inverted=self.inverted)
        budget = self.budget
        assert not isinstance(budget, LossLimit)
        with store.reading():
            run = store.resolve_run(self.run_id, "probe" if self.method == "retrieval_score" else "scan")
            plan = make_plan(
                store,
                run["run_id"],
                method=self.method,
                budget=budget,
                sink=self.sink,
                recent=self.recent[0] if self.recent else None,
                pattern=pattern,
                seed=self.seed,
                granularity=self.granularity,
                block=self.block,
                chunk=self.chunk,
            )
        report(run_line(run))
        return plan

    def shown(self, result: HeadPlan, store: Store) -> Result:
        facts = {"file": str(self.out), "model": result.model.name, "budget": result.budget, "notes": result.notes}
        lines = result.summary()
        if result.method != "measured":
            from headscan.plans import METHOD_SHOWS
            from headscan.report.answers import Commands

            (run,) = [each for each in store.runs() if each["run_id"] == getattr(result.calibration, "run_id", None)]
            command = Commands.of(run, store.path, self.out).evaluate_plan
            shows = METHOD_SHOWS[result.method]
            lines += [
                f"not a measured loss: method {result.method} shows {shows}. The command that judges the plan:",
                f"  {command}",
            ]
            facts["judge_command"] = command
        rows = loads(result.to_json())["heads"]
        return Result(rows, lambda: "\n".join([*lines, f"written to {self.out}"]), facts)
