"""Train a small classifier and a small encoder-decoder on synthetic tasks, in one or two minutes on two cores.

The classifier names the colour after the word `pick`; other colours in the text distract. The encoder-decoder writes
the words of the source in reverse order, each in another language.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

COLOURS = ("red", "green", "blue")
_WORDS = tuple(f"w{number}" for number in range(12))
_OTHERS = {f"w{number}": f"v{(5 * number + 3) % 12}" for number in range(12)}
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_BATCH = 64


def coloured(rng: random.Random) -> tuple[str, str]:
    """Return a text and the colour after its word `pick`."""
    words = [rng.choice((*_WORDS, *COLOURS)) for _ in range(rng.randint(5, 10))]
    place, colour = rng.randrange(len(words)), rng.choice(COLOURS)
    return " ".join([*words[:place], "pick", colour, *words[place:]]), colour


def reversed_words(rng: random.Random) -> tuple[str, str]:
    """Return a source and its translation in reverse order."""
    words = [rng.choice(_WORDS) for _ in range(rng.randint(4, 7))]
    return " ".join(words), " ".join(_OTHERS[word] for word in reversed(words))


def examples(make: Callable[[random.Random], tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """Return examples of a task."""
    rng = random.Random(seed)
    return [make(rng) for _ in range(count)]


def write_examples(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    """Write examples as a TSV file."""
    path.write_text("".join(f"{text}\t{target}\n" for text, target in rows), encoding="utf-8")
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    words = (*_SPECIAL, *_WORDS, *_OTHERS.values(), *COLOURS, "pick")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _fit(model: PreTrainedModel, loss_of: Callable[[int], torch.Tensor], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def train_classifier(folder: Path, steps: int = 500) -> Path:
    """Train and save the classifier."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        id2label=dict(enumerate(COLOURS)),
        label2id={colour: number for number, colour in enumerate(COLOURS)},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    model = BertForSequenceClassification(config)

    def loss_of(step: int) -> torch.Tensor:
        texts, labels = zip(*examples(coloured, _BATCH, step), strict=True)
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt", return_token_type_ids=False)
        return model(**inputs, labels=torch.tensor([COLOURS.index(label) for label in labels])).loss

    _fit(model, loss_of, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_translator(folder: Path, steps: int = 1200) -> Path:
    """Train and save the encoder-decoder."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        scale_embedding=True,
    )
    model = MarianMTModel(config)

    def loss_of(step: int) -> torch.Tensor:
        sources, targets = zip(*examples(reversed_words, _BATCH, step), strict=True)
        inputs = tokenizer(list(sources), padding=True, return_tensors="pt", return_token_type_ids=False)
        labels = tokenizer(list(targets), padding=True, return_tensors="pt")["input_ids"]
        return model(**inputs, labels=labels.masked_fill(labels == 0, -100)).loss

    _fit(model, loss_of, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
