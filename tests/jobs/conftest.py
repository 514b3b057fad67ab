"""A small model with a tokenizer, saved as transformers saves them, a corpus of a few files, and small tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

import headscan
from headscan.architectures import FAMILIES, HEADS
from headscan.cluster.placement_base import PlacementRequest
from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import InProcessPool, Pool, open_pool
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import PlannedModel
from headscan.pruning import save_model
from headscan.runs.run_context import PoolFactory, Run
from headscan.settings.corpus_settings import ExamplesSpec
from headscan.settings.evaluation_settings import TaskConfig
from headscan.sizing import model_sizes
from headscan.sizing.model_sizes import ModelSizes
from headscan.steps.ablate import Ablate
from headscan.steps.evaluate import Evaluate
from headscan.store.store import Store
from headscan.texts.token_requests import LogLikelihood, Request
from tests import warm_python
from tests.jobs.steps.kv_plans import model_of
from tests.small_models import make_model
from tests.stores import copy_store

TEXTS = [
    f"{name} counts to {i}: " + " ".join(str(n) for n in range(i)) for i, name in enumerate(("ada", "bo", "cy"), 9)
]
THREADS = WholePlacement(1, "cpu", 1)


def of_threads(model: ModelSpec) -> Pool:
    """Open a pool in this process."""
    return open_pool(model, THREADS)


def refuse(_: ModelSpec) -> Pool:
    """Fail: the work is done, or a mistake is found, before a model is loaded."""
    raise AssertionError("a pool was opened")


def run_on(pool: Any, store: Store, others: PoolFactory | None = None, **options: Any) -> Run:
    """Return a run of a pool's model, with that pool.

    Args:
        others: Opens the pools of other models; None allows none.
    """
    spec = pool._spec

    def opened(model: ModelSpec) -> Pool:
        assert others is not None or model == spec
        return pool if model == spec or others is None else others(model)

    return Run(spec, store, opened, **options)


def make_tokenizer(vocabulary: int, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Return byte-level BPE of a few texts, with BOS before every text on request."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", model_max_length=1024)


@pytest.fixture(autouse=True)
def transformers_speaks() -> None:
    """Restore the messages of transformers, which commands in this process disable."""
    logging.set_verbosity_warning()


@pytest.fixture(autouse=True, scope="session")
def new_python() -> Iterator[Callable[..., CompletedProcess[str]]]:
    """Start Python as `prune` does to load what it saved. Tests load in a forked process, which saves seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        started = save_model.run_python
        patch.setattr(save_model, "run_python", warm_python.run_python)
        yield started


@pytest.fixture(autouse=True, scope="session")
def sizes_once() -> Iterator[None]:
    """Compute the sizes of each model once: commands need them to place it, and the dry run takes 0.3 s."""
    computed = model_sizes.model_sizes

    @cache
    def known(spec: ModelSpec, tokens: int, files: tuple[tuple[str, int, int], ...]) -> ModelSizes:
        return computed(spec, tokens)

    def sizes(spec: ModelSpec, tokens: int = 2048) -> ModelSizes:
        if not Path(spec.source).is_dir():
            return computed(spec, tokens)
        found = ((path.name, path.stat()) for path in sorted(Path(spec.source).iterdir()))
        return known(spec, tokens, tuple((name, state.st_size, state.st_mtime_ns) for name, state in found))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_sizes, "model_sizes", sizes)
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_model("llama", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def spec(model_folder: Path) -> ModelSpec:
    return ModelSpec(str(model_folder))


@pytest.fixture(scope="module")
def lm(spec: ModelSpec) -> LoadedModel:
    return headscan.load(spec.source)


@pytest.fixture(scope="module")
def model(spec: ModelSpec, lm: LoadedModel) -> PlannedModel:
    """The model as plans name it."""
    return model_of(spec, lm)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number:02}.txt").write_text(f"text {number}: {TEXTS[number % 3]} {'again ' * (7 * number)}")
    return folder


@pytest.fixture
def pool(spec: ModelSpec) -> InProcessPool:
    return InProcessPool(spec, THREADS)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s.duckdb"
    with Store(path).connect(create=True):
        pass
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Store:
    """A store that has been made, for that takes longer than to copy it."""
    return Store(copy_store(empty_store, tmp_path / "s.duckdb"))


@contextmanager
def zeroed_by_hand(lm: headscan.LoadedModel, heads: Sequence[tuple[int, int]], family: str = "llama") -> Iterator[None]:
    """Ablate heads by a plain hook of each output projection."""
    with ExitStack() as hooks:
        for layer, head in heads:

            def zero(_: nn.Module, args: tuple[Tensor], head: int = head) -> tuple[Tensor]:
                of_heads = args[0].clone().unflatten(-1, (HEADS, -1))
                of_heads[..., head, :] = 0
                return (of_heads.flatten(-2),)

            projection = lm.module(FAMILIES[family].projection_of(layer))
            hooks.callback(projection.register_forward_pre_hook(zero).remove)
        yield


@torch.no_grad()
def naive_likelihood(lm: headscan.LoadedModel, request: Request) -> LogLikelihood:
    """A request's answer from a forward pass of its own."""
    ids = torch.tensor([request.ids])
    log_probabilities = (
        lm.model(ids[:, :-1], use_cache=False).logits[0, -request.scored_tokens :].float().log_softmax(-1)
    )
    targets = ids[0, -request.scored_tokens :]
    greedy = int((log_probabilities.argmax(-1) == targets).sum())
    return LogLikelihood(log_probabilities.double().gather(1, targets[:, None]).sum().item(), greedy)


def write_task(folder: Path, name: str, rows: Sequence[dict[str, Any]], config: dict[str, Any]) -> None:
    """Write a task whose rows are in its folder."""
    for split in ("train", "test"):
        chosen = rows if split == "test" else rows[:4]
        (folder / f"{name}.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {s: str(folder / f"{name}.{s}.jsonl") for s in ("train", "test")}},
        "test_split": "test",
        "fewshot_split": "train",
        "doc_to_text": "{{q}}",
        "target_delimiter": "",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(common | config))


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of every kind of request, and a group of two that differ in size."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"{n} comes before", "choices": [f" {n + 1}", f" {n - 1}", " ada"], "a": n % 3} for n in range(1, 13)]
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    write_task(folder, "counting", rows, choice | {"metric_list": [{"metric": "acc"}]})
    described = {"description": "Count on.\n", "metric_list": [{"metric": "acc"}]}
    write_task(folder, "described", rows[:6], choice | described)
    write_task(folder, "few", rows[1:5], choice | {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]})
    mutual = [{"metric": "acc_mutual_info"}]
    write_task(folder, "informed", rows[:5], choice | {"metric_list": mutual})
    write_task(folder, "both_ways", rows[:5], choice | {"metric_list": [{"metric": "acc"}, *mutual]})
    write_task(folder, "graded", rows[:5], choice | {"metric_list": [{"metric": "brier_score"}]})
    group = {"metric": "acc", "weight_by_size": True}
    (folder / "numbers.yaml").write_text(
        json.dumps({"group": "numbers", "task": ["counting", "few"], "aggregate_metric_list": [group]})
    )
    last = {"output_type": "loglikelihood", "doc_to_target": "{{choices[0]}}"}
    write_task(folder, "ending", rows[:7], last | {"metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]})
    texts = [{"q": "", "text": text} for text in (*TEXTS, TEXTS[0] * 60)]
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}"}
    write_task(folder, "reading", texts, rolling)
    telling = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [
            {"name": "first", "filter": [{"function": "regex", "regex_pattern": "(\\S)"}, {"function": "take_first"}]},
            {"name": "all", "filter": [{"function": "take_first"}]},
        ],
    }
    write_task(folder, "telling", [row | {"choices": ["'"]} for row in rows], telling)
    sampled = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    write_task(folder, "dreaming", rows[:3], telling | {"generation_kwargs": sampled, "repeats": 2})
    endless = {"until": ["\n"], "max_gen_toks": 1024}
    write_task(folder, "endless", rows[:3], telling | {"generation_kwargs": endless})
    return folder


@pytest.fixture(scope="module")
def own_tasks_alone() -> Iterator[None]:
    """Without lm-eval's own tasks, whose list takes seconds: for groups and for names that no folder has."""
    import lm_eval.tasks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
        yield


# Settings of jobs.


def quiet(line: str) -> None:
    pass


@pytest.fixture
def evaluation(spec: ModelSpec, task_folder: Path) -> Evaluate:
    return Evaluate(spec, TaskConfig(("counting",), include_path=str(task_folder), limit=6), recall=None)


@pytest.fixture
def labelled(tmp_path: Path) -> Ablate:
    from tests.jobs.steps.labelled_models import LABELLED, save_classifier, write_lines

    examples = write_lines(tmp_path / "d.tsv", LABELLED)
    return Ablate(ModelSpec(str(save_classifier(tmp_path / "bert"))), data=ExamplesSpec(str(examples)))


@pytest.fixture
def cpu() -> PlacementRequest:
    return PlacementRequest(device="cpu")
