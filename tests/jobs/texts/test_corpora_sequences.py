"""Token sequences and shards: exact pieces, BOS policies, limits, hashes, the report."""

import hashlib
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headscan.texts import CorpusError, CorpusReport, CorpusSpec, TokenConfig, open_corpus, sequences, shards
from tests.sources import SHARED

BOS, EOS = 0, 1
STORIES = SHARED / "models" / "stories260K"


def make_tokenizer(template: str | None, *, bos: bool = True, eos: bool = True) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer; ``template`` adds its special tokens to a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    if template:
        special = [("<bos>", BOS), ("<eos>", EOS)]
        model.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    names = {"bos_token": "<bos>"} if bos else {}
    if eos:
        names["eos_token"] = "<eos>"
    return PreTrainedTokenizerFast(tokenizer_object=model, model_max_length=16, **names)


@pytest.fixture(scope="module")
def adds_bos() -> PreTrainedTokenizerFast:
    return make_tokenizer("<bos> $A")


@pytest.fixture(scope="module")
def adds_nothing() -> PreTrainedTokenizerFast:
    return make_tokenizer(None)


@pytest.fixture
def corpus_of(tmp_path):
    """A corpus with one file for each text."""

    def build(*texts: str, **options):
        root = tmp_path / "corpus"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for number, text in enumerate(texts):
            (root / f"{number:03}.txt").write_text(text)
        return open_corpus(CorpusSpec(str(root), **options))

    return build


def run(corpus, tokenizer, max_tokens, report=None, **options):
    return list(sequences(corpus, tokenizer, TokenConfig(max_tokens, **options), report))


def rows(result) -> list[list[int]]:
    return [sequence.ids.tolist() for sequence in result]


def test_truncate_takes_the_beginning(corpus_of, adds_bos):
    a, b = "abcdefghij", "xyz"
    report = CorpusReport()
    long, short = run(corpus_of(a, b), adds_bos, 6, report)
    assert long.ids.tolist() == adds_bos(a).input_ids[:6]
    assert short.ids.tolist() == adds_bos(b).input_ids
    assert (long.truncated, short.truncated) == (True, False)
    assert (long.index, long.document, long.source) == (0, 0, "000.txt")
    assert (short.index, short.document, short.source) == (1, 1, "001.txt")
    assert long.ids.dtype == np.int32
    assert (report.truncated, report.dropped_tokens, report.tokens) == (1, 5, 10)


def test_chunks_joined_are_the_document(corpus_of, adds_bos, adds_nothing):
    texts = ["The quick brown fox jumps.", "ab", "0123456789"]
    for tokenizer, prefix in ((adds_bos, [BOS]), (adds_nothing, [])):
        pieces = run(corpus_of(*texts), tokenizer, 6, mode="chunk", min_tokens=1)
        for number, text in enumerate(texts):
            own = [s.ids.tolist() for s in pieces if s.document == number]
            assert all(ids[: len(prefix)] == prefix for ids in own)
            assert [len(ids) for ids in own[:-1]] == [6] * (len(own) - 1)
            body = [token for ids in own for token in ids[len(prefix) :]]
            assert body == tokenizer(text, add_special_tokens=False).input_ids
        assert [s.index for s in pieces] == list(range(len(pieces)))
        assert not any(s.truncated for s in pieces)


def test_short_ends_are_counted(corpus_of, adds_nothing):
    report = CorpusReport()
    pieces = run(corpus_of("abcdefghijk", "xy"), adds_nothing, 4, report, mode="chunk", min_tokens=4)
    assert [len(s) for s in pieces] == [4, 4]
    assert (report.too_short, report.dropped_tokens, report.sequences, report.tokens) == (2, 5, 2, 8)
    assert report.examples["too_short"] == ["000.txt (3 tokens)", "001.txt (2 tokens)"]


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("bos", ["auto", "never"])
def test_pack_is_the_joined_documents_cut(corpus_of, eos, bos):
    tokenizer = make_tokenizer("<bos> $A", eos=eos)
    texts = ["abc", "d", "efghijklmnopq", "r", "s", "tuvw"]
    report = CorpusReport()
    pieces = run(corpus_of(*texts), tokenizer, 5, report, mode="pack", bos=bos)
    bodies = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    stream, owner = [], []
    for number, body in enumerate(bodies):
        joined = ([EOS] if eos and number else []) + body
        stream += joined
        owner += [number] * len(joined)
    room = 4 if bos == "auto" else 5
    starts = range(0, len(stream) - room + 1, room)
    prefix = [BOS] if bos == "auto" else []
    assert rows(pieces) == [prefix + stream[start : start + room] for start in starts]
    assert [s.document for s in pieces] == [owner[start] for start in starts]
    assert report.dropped_tokens == len(stream) % room
    assert report.too_short == bool(len(stream) % room)


def test_pack_of_many_short_documents(corpus_of, adds_nothing):
    texts = [chr(97 + i % 26) * (1 + i % 7) for i in range(150)]  # more than one batch of the tokenizer
    pieces = run(corpus_of(*texts), adds_nothing, 16, mode="pack")
    stream = adds_nothing("<eos>".join(texts), add_special_tokens=False).input_ids
    assert [token for row in rows(pieces) for token in row] == stream[: len(stream) // 16 * 16]


@pytest.mark.parametrize(
    ("template", "policy", "prefix", "suffix"),
    [
        ("<bos> $A", "auto", [BOS], []),
        (None, "auto", [], []),
        ("$A <eos>", "auto", [], [EOS]),
        ("<bos> $A <eos>", "auto", [BOS], [EOS]),
        ("<bos> $A", "always", [BOS], []),
        (None, "always", [BOS], []),
        ("<bos> $A <eos>", "always", [BOS], []),
        ("<bos> $A", "never", [], []),
        ("<bos> $A <eos>", "never", [], []),
    ],
)
def test_bos_policies(corpus_of, template, policy, prefix, suffix):
    tokenizer = make_tokenizer(template)
    body = tokenizer("abcdef", add_special_tokens=False).input_ids
    corpus = corpus_of("abcdef")
    assert rows(run(corpus, tokenizer, 16, bos=policy)) == [prefix + body + suffix]
    if policy == "auto":
        plain = [tokenizer("abcdef", truncation=True, max_length=n).input_ids for n in (16, 5)]
        assert [rows(run(corpus, tokenizer, n))[0] for n in (16, 5)] == plain
    room = 4 - len(prefix) - len(suffix)
    chunks = rows(run(corpus, tokenizer, 4, bos=policy, mode="chunk", min_tokens=1))
    assert chunks == [prefix + body[i : i + room] + suffix for i in range(0, 6, room)]


def test_always_needs_a_bos_token(corpus_of):
    tokenizer = make_tokenizer(None, bos=False)
    with pytest.raises(CorpusError, match="no BOS token"):
        sequences(corpus_of("abc"), tokenizer, TokenConfig(8, bos="always"))
    assert len(run(corpus_of("abc"), tokenizer, 8)) == 1


def test_special_tokens_leave_no_room(corpus_of):
    with pytest.raises(CorpusError, match=r"max_tokens=2` .*2 special tokens"):
        sequences(corpus_of("abc"), make_tokenizer("<bos> $A <eos>"), TokenConfig(2))


def test_limit_of_documents(corpus_of, adds_bos):
    assert {s.document for s in run(corpus_of("ab", "", "cd", "ef", limit_documents=2), adds_bos, 8)} == {0, 2}


def test_problems_are_reported_and_the_rest_is_scanned(corpus_of, adds_bos):
    corpus = corpus_of("good", "", "also good", *[" "] * 7)
    folder = Path(corpus.spec.name)
    (folder / "x.txt").write_bytes(b"caf\xe9")
    (folder / "y.jsonl").write_text('{"text": "fine"}\n{"n": 1}\n')
    (folder / "z.bin").write_bytes(b"")
    report = CorpusReport()
    found = run(open_corpus(corpus.spec), adds_bos, 16, report)
    assert [s.source for s in found] == ["000.txt", "002.txt", "y.jsonl:1"]
    assert (report.documents, report.sequences) == (13, 3)
    assert (report.empty, report.undecodable, report.no_text) == (8, 1, 1)
    assert report.skipped_files == {".bin": 1}
    assert len(report.examples["empty"]) == 5
    assert report.lines() == [
        "13 documents, 3 sequences, 20 tokens",
        "empty documents: 8 (001.txt (0 bytes); 003.txt (only white space); "
        "004.txt (only white space); 005.txt (only white space); "
        "006.txt (only white space); ...)",
        "undecodable documents: 1 (x.txt (not UTF-8 at byte 3))",
        "records without text: 1 (y.jsonl:2 (no column 'text'))",
        "skipped, .bin: 1 (z.bin)",
    ]
    assert json.loads(json.dumps(report.as_dict()))["undecodable"] == 1


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["", " "], {}, r"no sequence: empty documents: 2 \(000.txt"),
        (["a"], {"bos": "never"}, "pieces too short: 1 .*needs 2 tokens. Give longer texts"),
        (["abc"], {"mode": "pack"}, "pieces too short: 1 .*pack sequence needs 8 tokens. Lower `max_tokens`"),
    ],
)
def test_no_sequence_is_an_error_at_the_end(corpus_of, adds_bos, texts, options, message):
    stream = sequences(corpus_of(*texts), adds_bos, TokenConfig(8, **options))
    with pytest.raises(CorpusError, match=message):
        list(stream)


def test_hash_is_of_the_ids(corpus_of, adds_bos):
    (sequence,) = run(corpus_of("abc"), adds_bos, 8)
    assert sequence.content_hash == hashlib.sha256(sequence.ids.astype("<i4").tobytes()).hexdigest()[:16]


def test_same_folder_elsewhere_gives_the_same_shards(corpus_of, adds_bos, tmp_path):
    corpus = corpus_of("abcdefghij", "klmnop", "qrstuvwxyz")
    copy = tmp_path / "elsewhere"
    shutil.copytree(corpus.spec.name, copy)
    config = TokenConfig(4, mode="chunk")

    def cut(name: str, size: int = 3):
        return list(shards(sequences(open_corpus(CorpusSpec(name)), adds_bos, config), shard_size=size))

    first, second = cut(corpus.spec.name), cut(str(copy))
    assert [s.content_hash for s in first] == [s.content_hash for s in second]
    assert len({s.content_hash for s in first}) == len(first)
    assert [[q.content_hash for q in s.sequences] for s in first] == [
        [q.content_hash for q in s.sequences] for s in second
    ]
    everything = rows(run(corpus, adds_bos, 4, mode="chunk"))
    assert [row for s in first for row in rows(s.sequences)] == everything
    assert [len(s.sequences) for s in first] == [3, 3, 3, 1]
    assert [s.index for s in first] == [0, 1, 2, 3]
    (copy / "001.txt").write_text("klmnoX")
    changed = [s.content_hash for s in cut(str(copy))]
    assert [a == b.content_hash for a, b in zip(changed, first, strict=True)] == [True, False, True, True]


def test_shard_hash_sees_where_sequences_end(corpus_of, adds_nothing):
    one = next(shards(run(corpus_of("abcd", "efgh"), adds_nothing, 8), shard_size=2))
    two = next(shards(run(corpus_of("abc", "defgh"), adds_nothing, 8), shard_size=2))
    joined = [np.concatenate([s.ids for s in shard.sequences]).tolist() for shard in (one, two)]
    assert joined[0] == joined[1]
    assert one.content_hash != two.content_hash


def test_shard_size_is_checked():
    with pytest.raises(CorpusError, match="shard_size=0"):
        shards([], shard_size=0)


@pytest.mark.parametrize("bos", ["auto", "always"])
def test_a_document_without_tokens_is_too_short(corpus_of, bos):
    tokenizer = make_tokenizer("<bos> $A")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    report = CorpusReport()
    found = run(corpus_of("~~~", "abc"), tokenizer, 8, report, min_tokens=1, bos=bos)
    assert [s.source for s in found] == ["001.txt"]
    assert report.too_short == 1


def test_longer_than_the_model_gives_no_warning(corpus_of, caplog):
    logger = logging.getLogger("transformers")  # keeps its messages from the root logger, where caplog listens
    logger.addHandler(caplog.handler)
    try:
        run(corpus_of("a" * 100), make_tokenizer("<bos> $A"), 64)
        assert "longer than" not in caplog.text
        make_tokenizer("<bos> $A")("a" * 100)
        assert "longer than" in caplog.text, "the warning that is held back has changed its words"
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K model is not beside the project")
def test_a_real_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    corpus = open_corpus(CorpusSpec("python-stdlib-heldout", limit_documents=2))
    whole = [tokenizer(d.text, verbose=False).input_ids for d in corpus.documents()]
    assert rows(run(corpus, tokenizer, 128)) == [ids[:128] for ids in whole]
    chunks = run(corpus, tokenizer, 128, mode="chunk")
    assert all(s.ids[0] == tokenizer.bos_token_id for s in chunks)
    for number, ids in enumerate(whole):
        assert [t for s in chunks if s.document == number for t in s.ids[1:].tolist()] == ids[1:]
