"""A slow reference for labelled examples: one example and one set of ablated heads at a time, by plain hooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, PreTrainedModel

from headscan.architectures import ALL, ENCODERS, HEADS, LAYERS
from headscan.cluster.pool import InProcessPool
from headscan.engine.answer import AnswerItem
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.settings.corpus_settings import ExamplesSpec, LabelledMetric
from headscan.steps.ablate import Ablate
from headscan.steps.importance import Importance
from headscan.steps.referee.referee_step import Referee
from headscan.store.store import Store
from headscan.texts.labelled_texts import LabelledText, read_labelled
from tests.jobs.conftest import THREADS, run_on
from tests.jobs.steps.labelled_models import LABELLED, TRANSLATED, save_classifier, save_translator, write_lines


@contextmanager
def zeroed(model: PreTrainedModel, family: str, heads: list[tuple[str, int, int]]) -> Iterator[None]:
    """Ablate (site, layer, head) by plain hooks."""
    handles = []
    for site, layer, head in heads:

        def zero(_: nn.Module, args: tuple[Tensor], head: int = head) -> tuple[Tensor]:
            parts = args[0].clone().unflatten(-1, (HEADS, -1))
            parts[..., head, :] = 0
            return (parts.flatten(-2),)

        handles.append(model.get_submodule(ALL[family].projection_of(layer, site)).register_forward_pre_hook(zero))
    yield
    for handle in handles:
        handle.remove()


class Oracle:
    """One example at a time, without padding."""

    def __init__(self, config: Ablate | Importance, family: str) -> None:
        assert config.data is not None
        auto = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForSeq2SeqLM
        identity = identify(config.model)
        self.model, self.family = auto.from_pretrained(config.model.source).eval(), family
        self.tokenizer = identity.tokenizer
        self.texts = read_labelled(config.data, config.model, identity).texts
        self.longest = max(len(text.target_ids) for text in self.texts)

    @torch.no_grad()
    def metric(self, name: str, heads: list[tuple[str, int, int]]) -> float:
        with zeroed(self.model, self.family, heads):
            return METRICS[name](self, self.texts)

    def loss_of(self, text: LabelledText) -> Tensor:
        ids, target = torch.tensor([text.ids]), torch.tensor(text.target_ids)
        if self.family in ENCODERS:
            return F.cross_entropy(self.model(input_ids=ids).logits, target)
        start = torch.tensor([self.model.generation_config.decoder_start_token_id])
        decoder = torch.cat([start, target[:-1]])[None]
        logits = self.model(input_ids=ids, decoder_input_ids=decoder).logits[0]
        return F.cross_entropy(logits, target, reduction="sum")

    def write(self, text: LabelledText) -> str:
        out: Any = self.model.generate(  # type: ignore[operator]
            torch.tensor([text.ids]), num_beams=1, do_sample=False, max_new_tokens=2 * self.longest + 8
        )
        return self.tokenizer.decode(out[0], skip_special_tokens=True).strip()

    def loss(self, texts: tuple[LabelledText, ...]) -> float:
        return float(sum(self.loss_of(text) for text in texts)) / sum(len(text.target_ids) for text in texts)

    def accuracy(self, texts: tuple[LabelledText, ...]) -> float:
        chosen = [int(self.model(input_ids=torch.tensor([text.ids])).logits.argmax()) for text in texts]
        return float(np.mean([(number,) == text.target_ids for number, text in zip(chosen, texts, strict=True)]))

    def bleu(self, texts: tuple[LabelledText, ...]) -> float:
        return sacrebleu.corpus_bleu([self.write(text) for text in texts], [[text.target for text in texts]]).score


METRICS: dict[str, Callable[[Oracle, tuple[LabelledText, ...]], float]] = {
    "loss": Oracle.loss,
    "accuracy": Oracle.accuracy,
    "bleu": Oracle.bleu,
}


def config_of(folder: Path, family: str, metric: LabelledMetric | None = None) -> Ablate:
    save, lines = (save_classifier, LABELLED) if family in ENCODERS else (save_translator, TRANSLATED)
    model = save(folder / family, family)
    data = ExamplesSpec(str(write_lines(folder / "d.tsv", lines)))
    config = Ablate(ModelSpec(str(model)), data=data, metric=metric)
    if metric != "bleu" or family in ENCODERS:
        return config
    # The beginnings of the model's own outputs: on other targets a random model has a BLEU of 0.
    oracle = Oracle(config, family)
    written = zip(lines, oracle.texts, strict=True)
    rows = [{"source": line.split("\t")[0], "target": oracle.write(text)[:30] or "x"} for line, text in written]
    return replace(config, data=ExamplesSpec(str(write_lines(folder / "d.jsonl", [json.dumps(row) for row in rows]))))


def execute(step: Ablate | Referee, store: Store, pool: InProcessPool | None = None, **options: Any) -> Any:
    """Execute a step in small batches."""
    return step.execute(run_on(pool or InProcessPool(step.model, THREADS), store, batch_tokens=200, **options))


class Refusing(InProcessPool):
    def map(self, task: Any, items: Any) -> Any:
        items = list(items)
        assert not any(isinstance(item, AnswerItem) for item in items), "an arm runs again"
        return super().map(task, items)


def token_gradients(
    oracle: Oracle, kinds: list[str], text: LabelledText, removed: list[tuple[str, int, int]] | None = None
) -> dict[tuple[str, int], Tensor]:
    """Return the derivatives (1, tokens, heads) of the loss of an example by gates after ablated heads, by layer."""
    gates: dict[tuple[str, int], Tensor] = {}
    with zeroed(oracle.model, oracle.family, removed or []), ExitStack() as hooks:
        for kind, layer in product(kinds, range(LAYERS)):

            def gate(_: nn.Module, args: tuple[Tensor], kind: str = kind, layer: int = layer) -> tuple[Tensor]:
                heads = args[0].unflatten(-1, (HEADS, -1))
                gates[kind, layer] = torch.ones_like(heads[..., 0], requires_grad=True)
                return ((heads * gates[kind, layer][..., None]).flatten(-2),)

            name = ALL[oracle.family].projection_of(layer, kind)
            hooks.callback(oracle.model.get_submodule(name).register_forward_pre_hook(gate).remove)
        loss = oracle.loss_of(text) / len(text.target_ids)
        return dict(zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True))


def oracle_importance(
    oracle: Oracle, kinds: list[str], removed: list[tuple[str, int, int]]
) -> dict[tuple[str, int, int], float]:
    """Sum over tokens of absolute derivatives by gates after ablated heads, one example at a time."""
    total = {(kind, layer): torch.zeros(HEADS) for kind, layer in product(kinds, range(LAYERS))}
    for text in oracle.texts:
        for place, found in token_gradients(oracle, kinds, text, removed).items():
            total[place] += found.abs().sum((0, 1))
    return {(*place, head): float(total[place][head]) for place in total for head in range(HEADS)}
