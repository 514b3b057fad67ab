"""Small random classifiers and encoder-decoders in folders, with examples."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from headscan.architectures import ENCODERS
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_model

CLASSES = ("bad", "fine", "good")
LABELLED = [f"{name} counts to {i}\t{CLASSES[i % 3]}" for i, name in enumerate(("ada", "bo", "cy") * 4)]
TRANSLATED = [f"{name} counts to {i}\t{i} to counts {name}" for i, name in enumerate(("ada", "bo", "cy") * 4)]


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(300)
    tokenizer.pad_token = "</s>"
    return tokenizer


def save_classifier(folder: Path, family: str = "bert") -> Path:
    """Save a random classifier of three classes."""
    torch.manual_seed(0)
    words = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    labels = {"num_labels": 3, "id2label": dict(enumerate(CLASSES)), "label2id": {c: i for i, c in enumerate(CLASSES)}}
    config = AutoConfig.for_model(family, **words, **labels, **ENCODERS[family].config)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.18)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def save_translator(folder: Path, family: str = "bart") -> Path:
    """Save a random encoder-decoder."""
    model = make_model(family, vocabulary=300)
    model.config.decoder_start_token_id = 1
    model.generation_config.decoder_start_token_id = 1
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def write_lines(path: Path, lines: list[str]) -> Path:
    """Write lines to a file, and return it."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
