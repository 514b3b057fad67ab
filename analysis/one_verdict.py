"""One verdict on the demo model with the library's own parts, without a store, workers or lm-eval.

python analysis/one_verdict.py

`headscan evaluate MODEL --score output_norm_ln --share 0.1 --rule` does the same on any model and task; there a scan is
stored, forward passes are shared, and recall and random controls are judged, too.
"""

from __future__ import annotations

import numpy as np
import torch

import headscan
from headscan import ArmKind, ArmVerdict
from headscan.store.records import ArmRecord
from headscan.texts import held_out_files, make_questions
from headscan.verdicts.paired import QuestionClusters, paired_difference

lm = headscan.load("demo", device="cpu", dtype="float32")

# 1. A score of every head on texts (texts, layers, heads), and the value below which the lowest 10 % lie (in the
# pipeline: `rules_by_score` in headscan/engine/arms.py, from a scan in the store).
files = held_out_files()  # Python modules that the demo model has not read
texts = [path.read_text(encoding="utf-8")[:1000] for path in files[:3]]
scores = headscan.score(headscan.collect(lm, texts), "output_norm_ln")
threshold = float(scores.quantile(0.1))

# 2. The arm: on each input, the heads below the threshold are ablated.
rule = headscan.HeadRule("output_norm_ln", threshold)

# 3. The questions, on other modules: which of four passages continues a text? (In the pipeline: tasks of lm-eval, whose
# requests `shared_row_likelihoods` in headscan/engine/shared_row_likelihood.py answers.)
questions = [question for path in files[3:18] for question in make_questions([path], 2)]
tokenizer = lm.require_tokenizer()
start = tokenizer("")["input_ids"]  # the token that begins every text


def tokens(text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def log_likelihood(context: list[int], passage: list[int]) -> float:
    """Return the log-probability of the passage's tokens after the context."""
    ids = torch.tensor([context + passage])
    with torch.no_grad():
        log_p = lm.model(ids[:, :-1]).logits[0].log_softmax(-1)  # the last token is predicted, not read
    return float(log_p[len(context) - 1 :].gather(1, ids[0, len(context) :, None]).sum())


def right_answers() -> np.ndarray:
    """Return 1 or 0 for each question: does the context raise the right passage's likelihood most?"""
    found = []
    for question in questions:
        gains = [
            log_likelihood(start + tokens(question["context"]), tokens(choice)) - log_likelihood(start, tokens(choice))
            for choice in question["choices"]
        ]
        found.append(float(np.argmax(gains) == question["answer"]))
    return np.array(found)


whole = right_answers()
shares: list[float] = []  # of the heads that the rule ablates, by pass
with (
    headscan.intervene(lm, rule) as record,  # removed on any exit
    lm.model.register_forward_hook(lambda *_: shares.append(record.ablated_share)),
):
    ablated = right_answers()

# 4. The verdict: a paired difference with its interval, and the rule of `decision` in headscan/verdicts/arm_verdict.py.
# Questions of one module are correlated, so whole modules are drawn for the interval.
clusters = QuestionClusters(len(questions), clusters=np.array([question["module"] for question in questions]))
paired = paired_difference(whole, ablated, clusters)
share = float(np.mean(shares))
arm = ArmRecord(name="rule by output_norm_ln", kind=ArmKind.RULE, ablated_share=share)
verdict = ArmVerdict(arm=arm, accuracy=paired)
print(f"{paired.questions} questions of {paired.texts} modules: the rule ablates {100 * share:.1f} % of the heads")
print(f"{paired.baseline:.1f} % right with all heads, {paired.arm:.1f} % with the rule")
print(f"difference {paired.interval.words(unit=' points')}; {paired.gained} gained, {paired.lost} lost")
print(f"{verdict.label}: {verdict.why}")
