"""Documents longer than a window: their tokens are those of the whole text, in little memory."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headscan.texts import CorpusError, CorpusReport, CorpusSpec, TokenConfig, open_corpus, sequences, tokenising
from headscan.texts.documents import PIECE_BYTES, StringText
from tests.sources import ROOT, SHARED

STORIES = SHARED / "models" / "stories260K"
SENTENCES = [
    "It's the quick brown fox, isn't it? The lazy dogs jumped over 12 345 fences -- and 2024's 6789 walls.\n",
    "日本語のテキスト。中文文本没有空格的长句子，测试测试。",
    "Привет, как дела? Ça va très bien, señor. ",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n\n",
    "😀😃👩‍🚀👧🏽🇩🇪 e\u0301\u0316o\u0308 ",
]
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def bpe(normalizer=None, pre=None, *, bytes_: bool = True, **options) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if bytes_ else []
    # Limited to 90 the alphabet would lose bytes, and any of them: "incomplete" is for that.
    limit = {} if bytes_ and options.pop("complete", True) else {"limit_alphabet": 90}
    model = Tokenizer(models.BPE(**options))
    special = ["<unk>"] if "unk_token" in options else []
    if options.get("byte_fallback"):
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    return trained(
        model,
        trainers.BpeTrainer(
            vocab_size=1500, **limit, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
        normalizer,
        pre,
    )


def trained(model: Tokenizer, trainer, normalizer=None, pre=None) -> Tokenizer:
    if normalizer is not None:
        model.normalizer = normalizer
    if pre is not None:
        model.pre_tokenizer = pre
    model.train_from_iterator([sentence * 20 for sentence in SENTENCES], trainer)
    return model


def llama2() -> Tokenizer:
    """No pre-tokenizer: a whole text is one word."""
    found = bpe(
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split("▁", "merged_with_previous"),
        bytes_=False,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # finds none: they are ▁ by now
    return found


def llama3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = bpe(pre=pre_tokenizers.Sequence([split, byte_level]), ignore_merges=True)
    found.add_special_tokens(["<|endoftext|>"])
    return found


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    squeeze = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return trained(Tokenizer(models.Unigram()), trainer, squeeze, pre_tokenizers.Metaspace())


def wordpiece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)
    return trained(
        Tokenizer(models.WordPiece(unk_token="[UNK]")),
        trainer,
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )


def word_level() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    return trained(
        Tokenizer(models.WordLevel(unk_token="[UNK]")), trainer, normalizers.Lowercase(), pre_tokenizers.Whitespace()
    )


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: bpe(pre=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "incomplete": lambda: bpe(pre=pre_tokenizers.ByteLevel(add_prefix_space=True), complete=False),
    "nfc": lambda: bpe(normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama2": llama2,
    "llama3": llama3,
    "metaspace": lambda: bpe(pre=pre_tokenizers.Metaspace(), bytes_=False, unk_token="<unk>", fuse_unk=True),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "word_level": word_level,
}


@pytest.fixture(scope="module", params=[*TOKENIZERS, "stories260K"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param == "stories260K":
        if not STORIES.is_dir():
            pytest.skip("the stories260K model is not beside the project")
        return AutoTokenizer.from_pretrained(STORIES)
    return PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[request.param]())


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "WINDOW_CHARACTERS", 4096)


def random_text(draw: random.Random, length: int) -> str:
    """Prose, source, CJK, combining marks, emoji, runs of one character, text without spaces, and special tokens."""
    kinds: list[Callable[[int], str]] = [
        lambda n: "".join(draw.choice(SENTENCES) for _ in range(n // 40 + 1)),
        lambda n: "".join(draw.choice("日本語中文字测试一二三的了是我不在人们，。") for _ in range(n)),
        lambda n: "".join(draw.choice("ACGT") for _ in range(n)),
        lambda n: draw.choice("a -=\n0é日😀") * (n // 4),
        lambda n: "".join(draw.choice("0123456789") for _ in range(n)),
        lambda n: "".join(draw.choice("😀👩‍🚀👧🏽🇩🇪éü\u0301\u0316\u200b") for _ in range(n)),
        lambda n: "e" + "\u0301\u0316" * (n // 8),
        lambda n: "".join(
            chr(draw.choice([draw.randrange(32, 127), draw.randrange(0xA0, 0x2FF), 10])) for _ in range(n)
        ),
        lambda n: "".join(
            draw.choice(["<|endoftext|>", "word ", "  ", "\n\n", "\r\n", "it's ", "\t"]) for _ in range(n)
        ),
    ]
    text = ""
    while len(text) < length:
        text += draw.choice(kinds)(draw.choice([10, 100, 1500])) + draw.choice(["", " ", "\n"])
    return text[:length]


def in_pieces(text: str, draw: random.Random) -> Iterator[str]:
    """A text as a file is read, cut anywhere."""
    while text:
        size = draw.choice([1, 700, 5000])
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("seed", range(3))
def test_pieces_joined_are_the_tokens_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, small_windows: None, seed: int
) -> None:
    draw = random.Random(seed)
    text = random_text(draw, 60_000)
    whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    pieces = list(tokenising.token_pieces(tokenising._Characters(in_pieces(text, draw)), tokenizer, "x"))
    assert np.concatenate(pieces).tolist() == whole
    assert len(pieces) > 1
    assert all(piece.dtype == np.int32 for piece in pieces)


def test_a_run_that_normalisation_sorts_is_not_cut(small_windows: None) -> None:
    """NFC sorts all marks behind a character: those below it come before those above, however many there are."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["nfc"]())
    text = "a few words " * 300 + "e" + "\u0301\u0316" * 5000 + " and more words" * 300
    whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    pieces = list(tokenising.token_pieces(tokenising._Characters(iter([text])), tokenizer, "x"))
    assert np.concatenate(pieces).tolist() == whole


def test_modes_give_the_same_sequences_from_pieces_as_from_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["llama3"](), eos_token="<|endoftext|>")
    draw = random.Random(7)
    for number, length in enumerate((30_000, 50, 9_000, 20_000)):
        (tmp_path / f"{number}.txt").write_text(random_text(draw, length))
    corpus = open_corpus(CorpusSpec(str(tmp_path)))

    def run(**options) -> list[tuple]:
        report = CorpusReport()
        found = list(sequences(corpus, tokenizer, TokenConfig(64, **options), report))
        return [(s.ids.tolist(), s.document, s.source, s.truncated) for s in found] + [report.truncated, report.tokens]

    for mode in ("truncate", "chunk", "pack"):
        for limit in (None, 3, 250):
            whole = run(mode=mode, limit_sequences=limit)
            with monkeypatch.context() as patched:
                patched.setattr(tokenising, "WINDOW_CHARACTERS", 4096)
                assert run(mode=mode, limit_sequences=limit) == whole


def test_truncating_stops_at_the_tokens_it_needs(tmp_path: Path, small_windows: None) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["gpt2"]())
    read: list[int] = []

    class Counted(StringText):
        def pieces(self) -> Iterator[str]:
            for start in range(0, len(self.text), 1000):
                read.append(start)
                yield self.text[start : start + 1000]

    (tmp_path / "x.txt").write_text("a sentence. " * 10)
    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    (document,) = corpus.documents()
    long = type(document)(0, "x", Counted("another sentence, and one more. " * 100_000))
    ((_, pieces),) = tokenising.tokenise([long], tokenizer)
    assert pieces is not None
    next(pieces)
    assert len(read) < 30, "3.2 million characters are there"


def test_the_report_mentions_documents_that_were_not_tokenised(tmp_path: Path, small_windows: None) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["gpt2"]())
    (tmp_path / "a.txt").write_text("a sentence. " * 5000)
    (tmp_path / "b.txt").write_text("a sentence. " * 10)
    report = CorpusReport()
    list(sequences(open_corpus(CorpusSpec(str(tmp_path))), tokenizer, TokenConfig(16), report))
    assert (report.truncated, report.partly_tokenised) == (2, 1)
    assert "and the rest of 1 long document" in report.lines()[-1]


def test_text_without_a_place_to_cut_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "WINDOW_CHARACTERS", 4096)
    monkeypatch.setattr(tokenising, "LARGEST_WINDOW", 1 << 15)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["wordpiece"]())
    one_word = "x" * 20_000
    pieces = tokenising.token_pieces(tokenising._Characters(iter([one_word])), tokenizer, "dna.txt")
    assert np.concatenate(list(pieces)).tolist() == tokenizer(one_word, add_special_tokens=False)["input_ids"]
    with pytest.raises(CorpusError, match=r"dna.txt cannot be tokenised in parts.*within 32,768 characters"):
        list(tokenising.token_pieces(tokenising._Characters(iter([one_word * 10])), tokenizer, "dna.txt"))


class WithoutPositions:
    """A tokenizer in Python, which does not report where its tokens are: a token a character."""

    is_fast = False

    def __call__(self, texts: list[str], **options) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def test_a_tokenizer_without_positions_reads_whole_documents_of_limited_length(
    monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    monkeypatch.setattr(tokenising, "LARGEST_WINDOW", 1 << 15)
    text = "abc " * 5000
    pieces = tokenising.token_pieces(tokenising._Characters(iter([text])), WithoutPositions(), "x.txt")
    assert np.concatenate(list(pieces)).tolist() == [ord(character) for character in text]
    with pytest.raises(CorpusError, match=r"x.txt has more than 32,768 characters.*use a fast tokenizer"):
        list(tokenising.token_pieces(tokenising._Characters(iter([text * 2])), WithoutPositions(), "x.txt"))


def test_a_document_that_breaks_off_late_is_left_out_whole(tmp_path: Path) -> None:
    """One wrong byte behind megabytes of text: the document is counted, named, and none of it is scanned."""
    good = b"a line of text\n" * (2 * PIECE_BYTES // 15)
    wrong = {"bytes": b"caf\xe9 ", "nul": b"\0", "cut": "é".encode()[:1]}
    for name, tail in wrong.items():
        (tmp_path / f"{name}.txt").write_bytes(good + tail)
    (tmp_path / "blank.txt").write_bytes(b" \n" * PIECE_BYTES)
    (tmp_path / "good.txt").write_bytes(b"\xef\xbb\xbf" + good)
    found = {d.source: d for d in open_corpus(CorpusSpec(str(tmp_path))).documents()}
    assert {source: d.problem for source, d in found.items()} == {
        "blank.txt": "empty",
        "bytes.txt": "undecodable",
        "cut.txt": "undecodable",
        "good.txt": None,
        "nul.txt": "undecodable",
    }
    assert found["bytes.txt"].detail == f"not UTF-8 at byte {len(good) + 3}"
    assert found["cut.txt"].detail == f"not UTF-8 at byte {len(good)}"
    assert found["good.txt"].text == good.decode()


MEASURE = """
import resource, sys
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from headscan.texts import CorpusSpec, TokenConfig, open_corpus, sequences

tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1])

def count(name):
    corpus = open_corpus(CorpusSpec(name))
    corpus.fingerprint()
    return sum(len(s) for s in sequences(corpus, tokenizer, TokenConfig(512, mode="chunk", min_tokens=1)))

count(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = count(sys.argv[3])
print(tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the peak of memory is not reported")
def test_memory_does_not_grow_with_the_document(tmp_path: Path) -> None:
    """Ten times the text takes hardly more memory; before, 15 MB took 2 GB."""
    byte_level = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.save(str(tmp_path / "tokenizer.json"))
    line = "The quick brown fox jumps over the lazy dogs.\n"
    for name, megabytes in (("small", 1.5), ("large", 15)):
        (tmp_path / f"{name}.txt").write_text(line * int(megabytes * 1e6 / len(line)))
    command = [
        sys.executable,
        "-c",
        MEASURE,
        *(str(tmp_path / n) for n in ("tokenizer.json", "small.txt", "large.txt")),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    tokens, mebibytes = map(int, shown.split())
    assert tokens == (tmp_path / "large.txt").stat().st_size
    assert mebibytes < 100
