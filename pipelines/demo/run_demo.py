"""``headscan demo``: every step of the pipeline on held-out text.

Heads are selected on one half of the held-out modules and judged on the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from headscan.analysis.heads.head_ranking import rank_heads
from headscan.analysis.plans import HeadPlan, WindowShare, write_pattern
from headscan.analysis.report.write_report import write_report
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import judge
from headscan.cluster.placement.choose import place
from headscan.cluster.placement.devices import this_machine, usable_cores
from headscan.cluster.placement.placement_base import PlacementRequest
from headscan.cluster.pools.open_pool import open_pool
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.pipelines.corpora import CorpusSpec, TokenPlan
from headscan.pipelines.corpora.stdlib_files import held_out_files
from headscan.pipelines.demo import MODEL_FOLDER
from headscan.pipelines.evaluate.continuation_task import DEMO_TASK, write_task
from headscan.pipelines.evaluate.run_evaluation import evaluate
from headscan.pipelines.kv.compare_generation import GenerationTask, compare_generation
from headscan.pipelines.kv.measured_plan import measured_plan
from headscan.pipelines.kv.plan_arms import KeptHeads, plan_arms
from headscan.pipelines.recall import RecallPlan
from headscan.pipelines.runs.identity import identify
from headscan.pipelines.runs.openmp import max_threads
from headscan.pipelines.runs.run_options import RunOptions
from headscan.pipelines.runs.run_records import RunContext
from headscan.pipelines.runs.text_tables import show, text_table
from headscan.pipelines.scan.run_scan import scan
from headscan.pipelines.scoring.arms import BASELINE, controls, scored_masks, scored_rules
from headscan.pipelines.settings.evaluation_settings import DemoConfig, EvaluateConfig, TaskConfig
from headscan.pipelines.settings.measure_settings import ScanConfig
from headscan.pipelines.settings.saving_settings import MeasureConfig

SCORE = "output_norm_ln"
_CONTEXT = 512
_RECALL_LENGTH, _RECALL_QUESTIONS = 256, 200
#: Recent tokens of a window: the plan's texts are short, and a window must be much narrower to free anything.
_RECENT = 60
#: Texts and recall prompts of each kind that measure the damage of a window.
_TEXTS, _PROMPTS = 32, 16
_NEW_TOKENS = 48


def run_demo(config: DemoConfig, *, say: Callable[[str], None]) -> Path:
    """Run the demo, print results, and return the report's path."""
    if not (MODEL_FOLDER / "model.safetensors").is_file():
        raise HeadscanError(f"the demo model is missing in {MODEL_FOLDER}. Reinstall the package with its data files")
    say("scan, plan, evaluation and report together take about four minutes on 2 CPU cores")
    modules = held_out_files()
    to_scan = len(modules) // 2
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    store = Store(out / "demo.duckdb", on_wait=say)
    spec = ModelSpec(str(MODEL_FOLDER), dtype="float32")
    replicas = config.replicas or min(2, usable_cores())
    request = PlacementRequest("whole", replicas=replicas, device="cpu", max_threads=max_threads())
    placement = place(spec.sizes(_CONTEXT), [this_machine()], request).placement
    say(placement.describe())
    scanning = ScanConfig(
        model=spec,
        corpus=CorpusSpec("python-stdlib-heldout", limit_documents=to_scan),
        tokens=TokenPlan(_CONTEXT, mode="chunk", min_tokens=64),
        shard_size=32,
    )
    tasks = write_task(out / "task", modules[to_scan:], config.questions)
    # At longer lengths the demo model recalls too little to show a loss, and they cost most.
    recall = RecallPlan(lengths=(_RECALL_LENGTH,), questions=_RECALL_QUESTIONS)
    evaluating = EvaluateConfig(spec, TaskConfig((DEMO_TASK,), include_path=str(tasks)), recall)
    identity = identify(spec)
    with open_pool(spec, placement) as pool:
        say(f"\n1. scan: {to_scan} held-out modules of the standard library")
        anyway = config.resume_anyway
        scanned = scan(scanning, RunOptions(store, lambda: nullcontext(pool), identity, anyway, say))
        if scanned.report is not None:
            for line in scanned.report.lines():
                say(line)
        ranked = rank_heads(store, scanned.run_id, SCORE)
        print(f"\nThe most inactive heads by {SCORE} (headscan rank --store {store.path}):\n")
        print(_head_table(store, scanned.run_id, [(head.layer, head.head) for head in ranked[:10]]), flush=True)

        context = RunContext(identity, pool)
        say("\n2. plan: which KV heads need the whole cache? Measured on the scanned modules and on recall prompts")
        measuring = MeasureConfig(
            scanning.corpus, recents=(_RECENT,), max_tokens=_CONTEXT, sequences=_TEXTS, recall_prompts=_PROMPTS
        )
        plan = measured_plan(context, measuring, WindowShare(config.window_share), say=say)
        plan.save(out / "head_plan.json")
        exported = write_pattern(plan, out / "duoattention")
        for line in plan.summary():
            say(line)

        say(f"\n3. evaluate: which of four passages continues this code? {len(modules) - to_scan} other modules")
        arms = [BASELINE, *scored_masks(store, scanned.run_id, SCORE, [config.share])]
        arms += scored_rules(store, scanned.run_id, SCORE, [config.share])
        arms += controls(context.facts.grid, arms, config.controls)
        arms += plan_arms(plan, ("forward",), 1)
        evaluated = evaluate(evaluating, store, pool, arms, context=context, resume_anyway=anyway, say=say)
        generated = _generated(context, plan, modules[to_scan])
    print("\nThe verdict:\n")
    for sentence in judge(store, evaluated).sentences():
        show(f"  {sentence}")

    print(f"\nText generated with the plan's cache (headscan generate): {generated}")
    report = write_report(
        store,
        out / "report.html",
        scan_run=scanned.run_id,
        evaluate_run=evaluated,
        plan=plan,
        plan_file=out / "head_plan.json",
    )
    print(f"\nstore   {store.path}\nplan    {out / 'head_plan.json'}\nexport  {exported[0].parent}\nreport  {report}")
    return report


def _generated(context: RunContext, plan: HeadPlan, module: Path) -> str:
    """Return the outcome of generating text with the full cache and with the plan's."""
    prompt = context.identity.tokenizer(module.read_text(encoding="utf-8"))["input_ids"][: _CONTEXT - _NEW_TOKENS]
    found = context.pool.one(compare_generation, GenerationTask(KeptHeads.of(plan.heads), tuple(prompt), _NEW_TOKENS))
    at = found.first_difference
    texts = "the same text" if at is None else f"the same first {at} of {len(found.full.tokens)} tokens"
    share = found.planned.cache_bytes / found.full.cache_bytes
    return f"{share:.1%} of the cache's bytes, {texts}"


def _head_table(store: Store, run_id: str, heads: list[tuple[int, int]]) -> str:
    columns = f"layer, head, {SCORE}, output_norm, first_token_weight, entropy, distant_mass, {SCORE}_inactive"
    rows = store.query(f"select {columns} from head_summary where run_id = ?", [run_id]).to_pylist()
    by_head = {(row["layer"], row["head"]): row for row in rows}
    return text_table([by_head[head] for head in heads])
