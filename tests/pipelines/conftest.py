"""A small model with a tokenizer, saved as transformers saves them, and a corpus of a few files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from cluster.placement import WholePlacement
from cluster.pool import ModelSpec
from headscan.families import make_model

TEXTS = [
    f"{name} counts to {i}: " + " ".join(str(n) for n in range(i)) for i, name in enumerate(("ada", "bo", "cy"), 9)
]
THREADS = WholePlacement(1, "cpu", 1)


def make_tokenizer(vocabulary: int, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a few texts, with BOS in front of every text where asked."""
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
    """Commands run inside the test process silence transformers; every test begins with it heard."""
    logging.set_verbosity_warning()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_model("llama", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def spec(model_folder: Path) -> ModelSpec:
    return ModelSpec(str(model_folder))


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number:02}.txt").write_text(f"text {number}: {TEXTS[number % 3]} {'again ' * (7 * number)}")
    return folder
