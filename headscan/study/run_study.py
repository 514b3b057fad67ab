"""A study: one command that finds how many heads can go and how much cache can go, and leaves the files.

Scan, probe, importance, the choice of a criterion, plans, pruned models, and a judgement from small to large shares
that stops at the first failure (`ordered_shares`). What decides (criterion, order, number of questions) is fixed before
the judging questions are read. The same call resumes; every step is a run in the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headscan.engine.arms import BASELINE, Arm
from headscan.measure.probe_settings import BehaviourProbe
from headscan.plans import HeadPlan, WindowShare, load_plan
from headscan.report.write_report import write_report
from headscan.runs.head_orders import head_order, run_kind
from headscan.runs.progress import at_work, time_text
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import SHORTEST
from headscan.settings.evaluation_settings import RecallQuestions, TaskConfig
from headscan.settings.saving_settings import PruneTexts, RecallPrompts
from headscan.steps.evaluate import Evaluate
from headscan.steps.importance import Importance
from headscan.steps.plan import Plan
from headscan.steps.probe import Probe
from headscan.steps.prune.prune_step import Prune
from headscan.steps.prune.pruned_arms import BuiltModel
from headscan.steps.prune.work_folder import delivered_model
from headscan.steps.run_evaluation import Purpose, run_evaluation
from headscan.steps.run_plan import measured_plans, own_loss, shown_loss
from headscan.steps.scan import Scan
from headscan.store.output_files import write_text
from headscan.store.verdict_limits import MIN_DOCUMENTS, MIN_TEXTS_IN_LIMIT
from headscan.study.question_costs import QuestionCosts, limits_per_task, question_costs, repair_texts
from headscan.study.study_answer import CACHED, Saving, SavingKind, StudyAnswer
from headscan.study.study_candidates import Candidates, ablations, best_criterion, caches, mask_arms, removals
from headscan.study.study_clock import StudyClock
from headscan.study.study_engines import for_engine, kv_counts, plan_block, recent_tokens, removed_shares
from headscan.study.study_step import FEWEST_STUDY_TEXTS, LONGEST_STUDY_TEXT, Study, StudyError, resumed, write_study
from headscan.study.study_texts import StudyTexts, document_of, split_texts
from headscan.study.study_time import TimedPass, decided, looks_of, measures_recall, study_seconds, time_pass
from headscan.text_tables import counted, percent
from headscan.texts import TokenConfig
from headscan.texts.continuation_task import CONTINUATION, write_task
from headscan.texts.held_out_text import HeldOutText, chunks
from headscan.texts.sequences import read_spread
from headscan.texts.tasks import Questions
from headscan.verdicts.arm_verdict import loss_words
from headscan.verdicts.judge import judge
from headscan.verdicts.looks import Look
from headscan.verdicts.metrics import Increase, exceeds, read_losses
from headscan.verdicts.ordered_shares import Outcome, ShareVerdict, goes_on, judge_shares


def run_study(config: Study, run: Run) -> StudyAnswer:
    """Find the largest safe shares, and write the answers, the files and the report into a folder, which has the store
    of ``run``. Its model is held whole in this process.
    """
    study = _Study.begin(config, run)
    with study.clock.running():
        return study.answer()


def planned_study(config: Study, run: Run) -> StudyAnswer:
    """Decide what the settings leave open, report it, and return the approximate seconds of each step."""
    started, tokens = time.monotonic(), _tokens(config, run)
    texts = split_texts(config.texts, Path(config.out) / "texts", config.judge, run.say)
    known, costs, speed = _decisions(replace(config, max_tokens=tokens), run, texts)
    assert known.questions is not None and known.judged_texts is not None
    return StudyAnswer(
        model=run.identity.name,
        corpus=config.texts.name,
        layers=run.facts.grid.num_layers,
        heads=run.facts.grid.total_heads,
        questions=known.questions,
        texts=known.judged_texts,
        tokens=tokens,
        max_loss=config.max_loss,
        max_points=config.max_points,
        savings=(),
        losses={},
        report="",
        store="",
        seconds=time.monotonic() - started,
        steps=study_seconds(known, costs, speed),
    )


def _tokens(config: Study, run: Run) -> int:
    """Return the length of the texts, which fits the model."""
    limit = run.identity.max_tokens
    tokens = config.max_tokens or min(limit or LONGEST_STUDY_TEXT, LONGEST_STUDY_TEXT)
    if limit is not None and tokens > limit:
        raise StudyError(f"`max_tokens={tokens}` (limit {limit} positions of the model). Lower `max_tokens`")
    return tokens


def _decisions(config: Study, run: Run, texts: StudyTexts) -> tuple[Study, QuestionCosts, float]:
    """Time a pass and ask a few questions; return the settings without open decisions, the costs of the questions and
    the speed in tokens per second.
    """
    config = for_engine(config, run)
    assert config.max_tokens is not None
    timed = TimedPass(max(1, min(4, 2048 // config.max_tokens)), config.max_tokens)
    with at_work("timed pass"):
        speed: float = run.pool.one(time_pass, timed)
    costs = question_costs(config, run, texts)
    return decided(config, speed, costs, run.say), costs, speed


def _check_model(file: Path, run: Run) -> None:
    """Raise StudyError if the plans and pruned models of a folder are of another model, whose hashes ``file`` holds."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if differing := [name for name, value in run.identity.fingerprint().items() if known.get(name) != value]:
        raise StudyError(
            f"{file.parent} holds a study of another model (differing: {', '.join(differing)}). Choose another folder"
            " as `out`"
        )


@dataclass(frozen=True)
class _Study:
    """A study in progress; ``config`` has no open decisions."""

    config: Study
    run: Run
    texts: StudyTexts
    tokens: int
    clock: StudyClock

    @classmethod
    def begin(cls, config: Study, run: Run) -> _Study:
        """Split the texts, time a pass and decide what the settings leave open."""
        clock = StudyClock(Path(config.out))
        record = Path(config.out) / "study.yaml"
        known = resumed(record, config)
        settings, model = known or config, Path(config.out) / "model.json"
        if known is not None:
            _check_model(model, run)
        texts = split_texts(settings.texts, Path(config.out) / "texts", settings.judge, run.say)
        tokens = _tokens(config, run)
        if known is None:
            known, costs, speed = _decisions(replace(config, max_tokens=tokens), run, texts)
            clock.set_plan(study_seconds(known, costs, speed), (costs.tokens / speed, costs.recall_tokens / speed))
            write_text(model, json.dumps(run.identity.fingerprint()))
            write_study(record, known)
        else:
            run.say(
                f"{record}: resuming with {counted(known.questions or 0, 'question')} and"
                f" {known.recall_questions} of each recall task"
            )
            for line in clock.left(known.hours):
                run.say(line)
        if (blocks := len(texts.judged_files)) < MIN_TEXTS_IN_LIMIT:
            run.say(
                f"the texts that judge are of {counted(blocks, 'document')} or blocks of 20,000 characters (limit"
                f" {MIN_TEXTS_IN_LIMIT}): no share can be shown to be safe. Give more text"
            )
        return cls(known, run, texts, tokens, clock)

    # The steps.

    def answer(self) -> StudyAnswer:
        """Run every step and write the answers."""
        scan_run = self._scan_run
        candidates = self._candidates()
        loss_run, losses = self._losses([arm for each in candidates for arm in each.arms])
        run_id, judged, more = self._judged(candidates, loss_run, losses)
        savings = tuple(each.saving_of(judged[each.kind]) for each in candidates)
        with at_work("report"):
            report = self._report(scan_run, run_id, savings, losses)
        grid = self.run.facts.grid
        answer = StudyAnswer(
            model=self.run.identity.name,
            corpus=self.config.texts.name,
            layers=grid.num_layers,
            heads=grid.total_heads,
            questions=self._questions(run_id),
            texts=len(self._judged_text.chunks),
            tokens=self.tokens,
            max_loss=self.config.max_loss,
            max_points=self.config.max_points,
            savings=savings,
            losses=losses,
            more_questions=self._looks[-1].questions if more else 0,
            report=str(report),
            store=str(self.run.store.path),
            seconds=self.clock.seconds,
            engine=self.config.engine or "transformers",
        )
        answer.save(Path(self.config.out) / "answers.json")
        return answer

    @cached_property
    def _scan_run(self) -> str:
        """Scan and probe; returns the scan's id."""
        config, tokens = self.config, self._measured_tokens
        self._begin_step("1. scan: every head on the measuring texts")
        shard = max(1, self._sequences // 8)
        run_id = Scan(config.model, self.texts.measure, tokens, shard_size=shard).execute(self.run).run_id
        self._begin_step("2. probe: induction, previous-token and retrieval heads")
        probing = BehaviourProbe(lengths=(512,))
        Probe(config.model, corpus=self.texts.measure, probe=probing).execute(self.run)
        return run_id

    @cached_property
    def _importance_run(self) -> str:
        """Importance on the measuring texts, and on recall prompts if a criterion needs them; returns the run's id."""
        measuring = Importance(
            self.config.model,
            self.texts.measure,
            self._measured_tokens,
            shard_size=max(1, self._sequences // 8),
            recall_prompts=self.config.recall_prompts if measures_recall(self.config) else 0,
        )
        return measuring.execute(self.run).run_id

    def _order(self, criterion: str) -> list[tuple[int, int]]:
        """Return all heads, the least important first."""
        run_id = self._scan_run if run_kind(criterion) == "scan" else self._importance_run
        return [(head.layer, head.head) for head in head_order(self.run.store, run_id, criterion)]

    def _candidates(self) -> list[Candidates]:
        """Return the candidates of every kind that the settings and the hours allow."""
        config, found, criterion = self.config, list[Candidates](), ""
        if config.shares:
            masks, criterion = self._masks()
            found.append(ablations(masks, criterion, config, self.run))
        if config.window_shares and self._has_time("the plans"):
            tried = tuple(str(self._tried_plan(share)) for share in config.window_shares)
            found.append(caches(self._plans(), self.tokens, self._plan_file, tried, config, self.run))
        if config.prune_shares and self._has_time("the pruned models"):
            found.append(removals(self._pruned(criterion), config, self.run))
        if not found:
            raise StudyError(f"`hours={config.hours:g}` were used up before anything could be tried. Raise `hours`")
        return found

    def _masks(self) -> tuple[list[Arm], str]:
        """Return the arms of the best criterion, from small to large, and its name."""
        self._begin_step("3. importance, criterion: which score ranks the heads, on texts that judge nothing")
        config = self.config
        arms = {name: mask_arms(name, self._order(name), config.shares or ()) for name in config.ranking}
        if len(arms) == 1:
            return arms[config.ranking[0]], config.ranking[0]
        text = self._read_text(self.texts.choose, max(FEWEST_STUDY_TEXTS, self._judged_texts // 2), "choose")
        recall_plan = self._recall(config.recall_prompts, seed=1)
        choosing = Evaluate(config.model, recall=recall_plan, text=text)
        run_id = run_evaluation(choosing, self.run, [BASELINE, *(arm for of_one in arms.values() for arm in of_one)])
        with at_work("choice of the criterion"):
            best = best_criterion(self.run, run_id, arms, config.max_loss)
        return arms[best], best

    def _plans(self) -> list[HeadPlan]:
        """Return the plans, smallest share first, and save them."""
        config = self.config
        self._begin_step("4. plans: which KV heads need the whole cache")
        measuring = Plan(
            config.model,
            method="measured",
            corpus=self.texts.measure,
            recent=(recent_tokens(config),),
            block=plan_block(config),
            max_tokens=self.tokens,
            sequences=self._sequences,
            recall_prompts=config.recall_prompts,
            search=bool(config.search),
        )
        shares = config.window_shares or ()
        plans = measured_plans(measuring, self.run, [WindowShare(share) for share in shares])
        for share, plan in zip(shares, plans, strict=True):
            plan.save(self._tried_plan(share))
            lost = shown_loss(plan, config.max_loss)
            stops = f". It loses {lost}, so no questions are asked" if lost else ""
            title = f"plan of {share:.3g}, on its own held-out prompts, in nats per token"
            self.run.say(f"{title}: {own_loss(plan)}{stops}")
        return plans

    def _pruned(self, criterion: str) -> list[BuiltModel]:
        """Return the pruned models, smallest share first; those on disk stay."""
        config, out = self.config, Path(self.config.out) / "pruned"
        method = "damage" if config.prune_by == "damage" else criterion
        unit, shares = removed_shares(config, self.run.facts.grid, self.run.say)
        repairing = max(self._sequences, repair_texts(self.run, self.tokens))
        pruning = Prune(
            config.model,
            out=out,
            shares=shares,
            unit=unit,
            kv_counts=kv_counts(config),
            methods=(method,),
            orders={} if method == "damage" else {method: self._order(method)},
            texts=PruneTexts(self.texts.measure, self.texts.choose, 2 * repairing, self.tokens),
            recall_prompts=RecallPrompts(prompts=2 * config.recall_prompts, max_tokens=self._recall_tokens),
            controls=0,
            timing=None,
            skip_verdict=True,
        )
        known = [delivered_model(folder) for folder in pruning.folders]
        if all(known):
            return [each for each in known if each is not None]
        self._begin_step(f"5. pruning: heads chosen by {method}, projections repaired")
        return list(pruning.execute(self.run).models)

    def _losses(self, arms: list[Arm]) -> tuple[str, dict[str, Increase]]:
        """Return the run that judges the loss, and its increases by arm name, widened for the kinds of savings."""
        self._begin_step("6. held-out loss of every candidate")
        reading = Evaluate(self.config.model, recall=None, text=self._judged_text)
        run_id = run_evaluation(reading, self.run, [BASELINE, *arms])
        return run_id, read_losses(self.run.store, run_id, comparisons=self.config.kind_count)

    def _judged(
        self, candidates: Sequence[Candidates], loss_run: str, losses: Mapping[str, Increase]
    ) -> tuple[str, dict[SavingKind, list[ShareVerdict]], bool]:
        """Ask the questions of the looks, from small to large shares; each kind ends with its first share that is not
        safe. The hours limit all but the questions of the first hours about the smallest shares. Return the run's id,
        the verdicts of every kind, of which each has at least one, and True if more hours can ask more.
        """
        config, looks = self.config, self._looks
        self._begin_step("7. questions, from small to large shares; the first failure ends each kind")
        judged: dict[SavingKind, list[ShareVerdict]] = {}
        tried = {each.kind: each for each in candidates}
        stopped = {name: why for each in candidates for name, why in each.saving.stopped.items()}
        number, look, run_id = dict.fromkeys(tried, 0), dict.fromkeys(tried, 1), ""
        while number:
            # The arms of one round share the work of the baseline.
            first = min(look.values())
            kinds = [kind for kind in number if look[kind] == first]
            here = looks[first - 1]
            of_first_hours = here.questions <= (config.questions or 0)
            certain = not judged or (of_first_hours and any(number[kind] == 0 for kind in kinds))
            arms = [tried[kind].arms[number[kind]] for kind in kinds]
            asking = f"look {first} of {', '.join(arm.name for arm in arms)}"
            lost = {arm.name for arm in arms if exceeds(losses[arm.name], config.max_loss)} | stopped.keys()
            asked = [BASELINE, *(arm for arm in arms if arm.name not in lost)]
            if not certain and not self._has_time("further questions", asking, self._asking_seconds(first, len(asked))):
                return run_id, judged, True
            run_id = self._ask(first, asked, loss_run)
            with at_work("verdicts"):
                verdict = judge(self.run.store, run_id, baseline_alone=True)
            recall = f", {here.recall:,} of each recall task" * bool(here.recall)
            self.run.say(f"look {first} of {len(looks)}: {counted(here.questions, 'question')}{recall}")
            for kind in kinds:
                judged[kind] = judge_shares(verdict, tried[kind].saving.tried, stopped)
                last, number[kind] = judged[kind][-1], len(judged[kind]) - 1  # a resumed study has later shares, too
                if last.look is not None and goes_on(verdict.by_name[last.name], looks, config.questions or 0):
                    look[kind] = last.look + 1
                    continue
                on = f" on {counted(last.questions, 'question')}" * bool(last.questions)
                self.run.say(
                    f"{kind.name}, {percent(last.share)}{on}: {last.label}{f' ({last.why})' if last.why else ''}"
                )
                number[kind], look[kind] = len(judged[kind]), 1
                if last.outcome is not Outcome.SAFE or number[kind] == len(tried[kind].arms):
                    del number[kind], look[kind]
        return run_id, judged, False

    def _ask(self, look: int, arms: Sequence[Arm], loss_run: str) -> str:
        """Ask the questions of a look that earlier ones did not ask; return the run's id."""
        config, looks = self.config, self._looks
        judging = {
            "kinds": config.kind_count,
            "max_loss": config.max_loss,
            "max_points": config.max_points,
            "looks": looks,
            "losses": loss_run,
        }
        limits, recall = [0, *self._limits], [0, *(each.recall for each in looks)]
        ranges = range(limits[look - 1], limits[look]), range(recall[look - 1], recall[look])
        asked = self._recall(recall[look], seed=0) if ranges[1] else None
        every = self._recall(recall[-1], seed=0)
        purpose = Purpose(
            settings={"judging": judging, "limit": limits[-1], "recall": None if every is None else every.settings()},
            look=look,
        )
        questions = Questions(self._tasks, asked, self.run.identity, recall_only=True, part=ranges)
        return run_evaluation(
            Evaluate(config.model, self._tasks, asked), self.run, arms, questions=questions, purpose=purpose
        )

    def _report(self, scan_run: str, run_id: str, savings: Sequence[Saving], losses: Mapping[str, Increase]) -> Path:
        files = [Path(each.file or each.tried_file) for each in savings if each.kind == CACHED]
        plan = load_plan(files[0]) if files else None
        finished = self._count("SELECT count(*) FROM arms WHERE run_id = ? AND status = 'finished'", run_id)
        limit = self.config.max_loss
        lost = {name: loss_words(each, limit) for name, each in losses.items() if exceeds(each, limit)}
        return write_report(
            self.run.store,
            Path(self.config.out) / "report.html",
            scan_run=scan_run,
            evaluate_run=run_id if finished > 1 else None,
            plan=plan,
            plan_file=None if plan is None else files[0],
            answers=[saving.card() for saving in savings],
            cache=next((saving.cache_counted for saving in savings if saving.length), None),
            lost=lost,
        )

    # What the steps share.

    def _begin_step(self, title: str) -> None:
        self.run.say(f"\n{title} ({self.clock.begin(title)})")

    def _asking_seconds(self, look: int, arms: int) -> float:
        """Return about how many seconds the questions of a look take that earlier looks did not ask."""
        earlier, here = ((0, 0), *((each.questions, each.recall) for each in self._looks))[look - 1 : look + 1]
        return self.clock.asking_seconds(here[0] - earlier[0], here[1] - earlier[1], arms)

    def _has_time(self, step: str, name: str = "", expected: float = 0.0) -> bool:
        """Return False, and report that a step is left out, if it would end after the hours of all calls. ``name`` is
        unique where a step has several parts; ``expected`` is the time that it takes, in seconds.
        """
        seconds = 3600 * self.config.hours
        if self.clock.has_time(name or step, seconds, expected):
            return True
        left = seconds - self.clock.seconds
        why = f"the {self.config.hours:g} hours are used up; {step} are left out"
        if left > 0:
            why = f"{step} take about {time_text(expected)} (limit {time_text(left)}), and are left out"
        self.run.say(f"{why}. The same command with more hours continues")
        return False

    @property
    def _sequences(self) -> int:
        assert self.config.sequences is not None
        return self.config.sequences

    @property
    def _judged_texts(self) -> int:
        assert self.config.judged_texts is not None
        return self.config.judged_texts

    @property
    def _measured_tokens(self) -> TokenConfig:
        return TokenConfig(self.tokens, mode="chunk", min_tokens=SHORTEST, limit_sequences=self._sequences)

    @property
    def _recall_tokens(self) -> int:
        return self.tokens - 1

    def _tried_plan(self, share: float) -> Path:
        return Path(self.config.out) / "plans" / f"{share:g}.json"

    @property
    def _plan_file(self) -> Path:
        return Path(self.config.out) / "head_plan.json"

    @cached_property
    def _judged_text(self) -> HeldOutText:
        return self._read_text(self.texts.judge, self._judged_texts, "judge")

    @cached_property
    def _looks(self) -> tuple[Look, ...]:
        """The looks, which follow from the recorded settings."""
        return looks_of(self.config)

    @cached_property
    def _tasks(self) -> TaskConfig:
        """The tasks that judge; without names those that are made from the judging texts."""
        config = self.config
        if config.tasks.names or not config.max_questions:
            return config.tasks
        folder = write_task(
            Path(config.out) / "task",
            self.texts.judged_files,
            config.max_questions,
            name=CONTINUATION,
            document_of=document_of,
        )
        return TaskConfig((CONTINUATION,), include_path=str(folder))

    @cached_property
    def _limits(self) -> list[int]:
        """The number of questions of each task that are asked by each look."""
        return limits_per_task(self._tasks, [look.questions for look in self._looks])

    def _recall(self, questions: int, seed: int) -> RecallQuestions | None:
        return RecallQuestions(lengths=(self._recall_tokens,), questions=questions, seed=seed) if questions else None

    def _read_text(self, corpus: Any, count: int, name: str) -> HeldOutText:
        tokenizer = self.run.identity.tokenizer
        texts = chunks(tokenizer, read_spread(corpus, tokenizer, self.tokens, count, shortest=SHORTEST), whole=True)
        documents = [document_of(text.document) for text in texts]
        if len({*documents}) >= MIN_DOCUMENTS:  # of fewer, blocks are judged, and verdicts say of how many documents
            texts = tuple(replace(text, document=of) for text, of in zip(texts, documents, strict=True))
        return HeldOutText(f"texts that {name}", texts)

    def _questions(self, run_id: str) -> int:
        """Return the number of benchmark questions with a right answer that the baseline answered."""
        return self._count(
            "SELECT count(correct) FROM answers JOIN arms USING (arm_id)"
            " WHERE run_id = ? AND kind = 'baseline' AND NOT recall",
            run_id,
        )

    def _count(self, sql: str, run_id: str) -> int:
        return int(self.run.store.query(sql, [run_id])[0][0].as_py())
