"""The lm-eval adapter against lm-eval's own Hugging Face model, and arms against hooks put in by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import headscan
from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE, Arm, Intervention, criterion_masks, mask_arm, random_controls, rules_by_score
from headscan.engine.likelihood import likelihoods
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, StoreError
from headscan.model_spec import ModelSpec
from headscan.runs.head_orders import find_run
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import HarnessError, TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_scan import run_scan
from headscan.steps.scan import Scan
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from headscan.texts.harness import HeadscanLM
from headscan.texts.token_requests import LogLikelihood, Request, Responses, input_key
from headscan.verdicts.judge import judge
from tests.jobs.conftest import TEXTS, run_on

pytestmark = pytest.mark.usefixtures("own_tasks_alone")

PAIRS = [
    ("ada counts to 3: 0 1", " 2"),
    ("ada counts to 12: 0 1 2 3 4 5 6", " 7 8 9 10 11"),
    ("", "bo counts"),
    ("cy ", "counts to 5"),
    (TEXTS[2] * 80, " again and again"),
]


def requests(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i, ("task", i, 1)) for i, pair in enumerate(pairs)]


def hugging_face(lm: headscan.LoadedModel) -> HFLM:
    return HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=2, max_length=lm.max_tokens)


def collected(spec: ModelSpec, pairs: list[tuple[str, str]]) -> tuple[HeadscanLM, tuple[Request, ...]]:
    adapter = HeadscanLM(identify(spec))
    adapter.loglikelihood(requests(pairs))
    found = [request for request in adapter.requests.values() if isinstance(request, Request)]
    assert len(found) == len(pairs)
    return adapter, tuple(found)


def answered(
    lm: headscan.LoadedModel, found: tuple[Request, ...], ablated: Intervention | None, batch_tokens: int, share: bool
) -> Responses[LogLikelihood]:
    return likelihoods(lm, found, ablated, batch_tokens, share)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 300, 100_000])
def test_log_likelihoods_are_those_of_lm_eval(spec: ModelSpec, batch_tokens: int, share: bool) -> None:
    lm = headscan.load(spec.source)
    theirs = hugging_face(lm).loglikelihood(requests(PAIRS), disable_tqdm=True)
    adapter, found = collected(spec, PAIRS)
    ours = answered(lm, found, None, batch_tokens, share)
    assert ours.ablated_shares == (0.0,) * len(PAIRS)
    adapter.answers = dict(zip(adapter.requests, ours.values, strict=True))
    for (a, greedy_a), (b, greedy_b) in zip(adapter.loglikelihood(requests(PAIRS)), theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy_a == greedy_b
    assert len(adapter.truncated) == 1


def test_a_request_without_tokens_names_its_task_and_document(spec: ModelSpec) -> None:
    adapter = HeadscanLM(identify(spec), bos="never")
    with pytest.raises(
        HarnessError, match=r"^task task, document 1: cannot score '', which has 0 tokens \(limits 1 and"
    ):
        adapter.loglikelihood(requests([("ada", " 2"), ("bo counts", "")]))
    asked = Instance("generate_until", {}, ("", {"until": ["x"]}), 0, ("telling", 7, 1))
    with pytest.raises(HarnessError, match=r"^task telling, document 7: the prompt has 0 tokens \(limit 1\)"):
        adapter.generate_until([asked])


@pytest.mark.parametrize(
    "ablated",
    [
        headscan.HeadMask([(0, 1), (2, 4)]),
        headscan.HeadRule("output_norm_ln", threshold=0.9),
        headscan.RandomHeads(0.3, seed=1),
    ],
)
def test_arms_ablate_heads_in_every_request(spec: ModelSpec, ablated: Intervention) -> None:
    lm = headscan.load(spec.source)
    tokenizer = lm.require_tokenizer()
    _, found = collected(spec, PAIRS[:2])
    ours = answered(lm, found, ablated, 200, share=True)
    for (context, continuation), answer, share in zip(PAIRS[:2], ours.values, ours.ablated_shares, strict=True):
        ids = tokenizer(context + continuation)["input_ids"]
        start = len(tokenizer(context)["input_ids"])
        # The last token is predicted, not read: a rule must not look at it.
        with torch.no_grad(), headscan.intervene(lm, ablated, input_keys=[input_key(ids[:-1])]) as record:
            logits = lm.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        assert share == pytest.approx(record.ablated_share)
        assert 0 < share < 1
        expected = sum(logits[i - 1, ids[i]].item() for i in range(start, len(ids)))
        assert answer.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert answer.greedy_tokens == sum(int(logits[i - 1].argmax()) == ids[i] for i in range(start, len(ids)))


def test_an_evaluation_stores_answers_and_resumes(
    spec: ModelSpec, pool: InProcessPool, task_folder: Path, tmp_path: Path
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    config = Evaluate(spec, TaskConfig(("counting",), include_path=str(task_folder)), recall=None)
    store = Store(tmp_path / "s.duckdb")
    mask = mask_arm([(1, 2), (0, 0)])
    said: list[str] = []
    run_id = run_evaluation(config, run_on(pool, store, say=said.append), [BASELINE, mask])
    assert [line.partition(": acc")[0] for line in said] == ["baseline", mask.name]
    answers = store.query(
        "select name, question, correct, log_likelihoods from answers join arms using (arm_id)"
    ).to_pylist()
    assert len(answers) == 24

    lm = headscan.load(spec.source)
    theirs = simple_evaluate(
        model=hugging_face(lm),
        tasks=["counting"],
        task_manager=TaskManager(include_path=str(task_folder)),
        bootstrap_iters=0,
    )
    assert theirs is not None
    baseline = {row["question"]: row for row in answers if row["name"] == "baseline"}
    for sample in theirs["samples"]["counting"]:
        mine = baseline[sample["doc_id"]]
        assert mine["correct"] == sample["acc"]
        assert mine["log_likelihoods"] == pytest.approx([value for value, _ in sample["filtered_resps"]], abs=1e-4)
    verdict = judge(store, run_id)
    assert verdict.arms[0].paired.questions == 12
    assert verdict.arms[0].arm.ablated_share == pytest.approx(2 / 18)

    # Again: both arms are there; one more arm joins the same run.
    again: list[str] = []
    more = Arm("rule", ArmKind.RULE, headscan.HeadRule("entropy", threshold=1.0), "entropy")
    assert run_evaluation(config, run_on(pool, store, say=again.append), [BASELINE, mask, more]) == run_id
    assert again[:2] == ["baseline: finished before", f"{mask.name}: finished before"]
    assert store.query("select count(*) as n from answers").to_pylist() == [{"n": 36}]


def test_arms_are_chosen_from_a_scan_of_this_model(
    spec: ModelSpec, pool: InProcessPool, corpus_folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "s.duckdb")
    config = Scan(spec, CorpusSpec(str(corpus_folder)), TokenConfig(64))
    scanned = run_scan(config, run_on(pool, store))
    identity = identify(spec)
    assert find_run(store, identity, "output_norm_ln", None) == scanned.run_id
    arms = criterion_masks(store, scanned.run_id, "output_norm_ln", [0.2])
    arms += rules_by_score(store, scanned.run_id, "output_norm_ln", [0.2])
    arms += random_controls(headscan.load(spec.source).grid, arms, 3)
    assert [arm.kind for arm in arms] == ["mask", "rule", *3 * ["random_mask"], *3 * ["random_rule"]]
    assert {arm.share for arm in arms} == {0.2}
    sizes = {len(arm.intervention.heads) for arm in arms if isinstance(arm.intervention, headscan.HeadMask)}
    assert sizes == {4}
    assert len({arm.intervention for arm in arms}) == 8
    lowest = store.query("select layer, head from head_summary order by output_norm_ln limit 4").to_pylist()
    assert isinstance(arms[0].intervention, headscan.HeadMask)
    assert set(arms[0].intervention.heads) == {(row["layer"], row["head"]) for row in lowest}
    other = Store(tmp_path / "other.duckdb")
    with pytest.raises(StoreError):
        find_run(other, identity, "output_norm_ln", None)
    with pytest.raises(InterventionError, match=r"measured .*, another model than other"):
        find_run(
            store, dataclasses.replace(identity, name="other", config_hash="other"), "output_norm_ln", scanned.run_id
        )
    assert isinstance(arms[1].intervention, headscan.HeadRule) and arms[1].intervention.widths == headscan.MassWidths()
    narrow = dataclasses.replace(config, widths=headscan.MassWidths(2, 9))
    [rule] = rules_by_score(store, run_scan(narrow, run_on(pool, store)).run_id, "output_norm_ln", [0.2])
    assert isinstance(rule.intervention, headscan.HeadRule) and rule.intervention.widths == narrow.widths
    store.finish_run(scanned.run_id, status="failed")
    with pytest.raises(InterventionError, match=f"run {scanned.run_id} is failed. Run its command again"):
        find_run(store, identity, "output_norm_ln", scanned.run_id)


def test_what_a_user_can_get_wrong(spec: ModelSpec, pool: InProcessPool, task_folder: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    config = Evaluate(spec, TaskConfig(("counting",), include_path=str(task_folder)), recall=None)
    with pytest.raises(HeadIndexError, match="layer 7 has no attention heads"):
        run_evaluation(config, run_on(pool, store), [BASELINE, mask_arm([(7, 0)])])
    assert not store.path.exists()
    with pytest.raises(HarnessError, match="did you mean counting"):
        run_evaluation(
            Evaluate(spec, TaskConfig(("countin",), include_path=str(task_folder))), run_on(pool, store), [BASELINE]
        )
    with pytest.raises(HarnessError, match="is no folder"):
        run_evaluation(
            Evaluate(spec, TaskConfig(("counting",), include_path=str(tmp_path / "absent"))), run_on(pool, store), []
        )
    with pytest.raises(HarnessError, match="no tasks"):
        run_evaluation(Evaluate(spec, TaskConfig()), run_on(pool, store), [BASELINE])
    with pytest.raises(InterventionError, match="empty mask"):
        mask_arm([])
    with pytest.raises(HeadscanError, match="limit=0"):
        TaskConfig(("counting",), limit=0)
