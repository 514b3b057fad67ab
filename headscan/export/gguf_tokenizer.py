"""The keys of a GGUF file that describe a tokenizer, copied from another GGUF file or made from a BPE."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFReader, GGUFValueType, TokenType

from headscan.errors import ExportError, first_line

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's names of pre-tokenizers, by their steps in tokenizer.json, and whether each takes whole words of the
#: vocabulary before it merges (``ignore_merges``).
_PRE_TOKENIZERS: dict[tuple[str, ...], tuple[str, bool]] = {
    ("words",): ("gpt-2", False),
    ("digits", "words"): ("smollm", False),
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", "bytes"): ("llama-bpe", True),
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", "bytes"): ("qwen2", False),
}


class Key(NamedTuple):
    """A key of a GGUF file; ``part`` is the type of an array's elements."""

    name: str
    value: Any
    type: GGUFValueType
    part: GGUFValueType | None = None


def copied_keys(path: Path) -> list[Key]:
    """Return the tokenizer's keys of a GGUF file."""
    try:
        fields = GGUFReader(path).fields
    except (OSError, ValueError, IndexError) as problem:
        raise ExportError(
            f"{path} cannot be read as a GGUF file ({first_line(problem)}). Name another file"
        ) from problem
    keys = [
        Key(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    ]
    if not any(key.name == "tokenizer.ggml.tokens" for key in keys):
        raise ExportError(f"{path} has no tokenizer. Name another GGUF file")
    return keys


def made_keys(tokenizer: Any, vocabulary: int, source: str) -> list[Key]:
    """Return the keys of a tokenizer of transformers for a model with ``vocabulary`` rows of embeddings.

    The tokenizer is a byte-level BPE with a pre-tokenizer that llama.cpp names, or a BPE of SentencePiece with bytes as
    a fallback.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _missing(source, "it has no tokenizer.json")
    saved = json.loads(backend.to_str())
    if saved["model"]["type"] != "BPE":
        raise _missing(source, f"its tokenizer is no BPE ({saved['model']['type']})")
    words = {**saved["model"]["vocab"], **{each["content"]: each["id"] for each in saved["added_tokens"]}}
    tokens, types = _tokens(words, saved["added_tokens"], vocabulary, source)
    merges = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in saved["model"]["merges"]]
    text = GGUFValueType.STRING
    ids = tokenizer("a").input_ids
    if saved["model"].get("byte_fallback"):
        keys = _sentencepiece_keys(saved, tokens, types, merges, source)
    else:
        keys = [
            Key("tokenizer.ggml.model", "gpt2", text),
            Key("tokenizer.ggml.pre", _pre_tokenizer(saved, source), text),
            Key("tokenizer.ggml.merges", [" ".join(pair) for pair in merges], GGUFValueType.ARRAY, text),
            Key("tokenizer.ggml.add_space_prefix", False, GGUFValueType.BOOL),
        ]
    keys += [
        Key("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, text),
        Key("tokenizer.ggml.token_type", types, GGUFValueType.ARRAY, GGUFValueType.INT32),
        Key("tokenizer.ggml.add_bos_token", ids[0] == tokenizer.bos_token_id, GGUFValueType.BOOL),
        Key("tokenizer.ggml.add_eos_token", ids[-1] == tokenizer.eos_token_id, GGUFValueType.BOOL),
    ]
    for name, number in (
        ("bos", tokenizer.bos_token_id),
        ("eos", tokenizer.eos_token_id),
        ("unknown", tokenizer.unk_token_id),
        ("padding", tokenizer.pad_token_id),
    ):
        if number is not None:
            keys.append(Key(f"tokenizer.ggml.{name}_token_id", number, GGUFValueType.UINT32))
    return keys + _chat_templates(tokenizer.chat_template, source)


#: The sign for a space in tokens of SentencePiece.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _sentencepiece_keys(
    saved: Mapping[str, Any], tokens: list[str], types: list[int], merges: list[tuple[str, ...]], source: str
) -> list[Key]:
    """Return the keys of a BPE of SentencePiece alone, and correct the types of its bytes and its unknown token.

    llama.cpp merges the neighbours whose joint token has the highest score, whether or not a merge names them. That
    equals merges in order if those of one token follow each other, and each two tokens that make a third are named.
    """
    number = {token: at for at, token in enumerate(tokens) if types[at] != TokenType.UNUSED}
    for byte in range(256):
        if (at := number.get(f"<0x{byte:02X}>")) is None:
            raise _missing(source, f"its tokenizer lacks a token for byte {byte}")
        types[at] = int(TokenType.BYTE)
    if (unknown := saved["model"].get("unk_token")) in number:
        types[number[unknown]] = int(TokenType.UNKNOWN)
    ranks: dict[str, int] = {}
    for pair in merges:
        made = "".join(pair)
        if ranks.setdefault(made, len(ranks)) != len(ranks) - 1:
            raise _missing(source, f"the merges for its token {made!r} do not follow each other")
    named = set(merges)
    normal = dict.fromkeys(token for token, at in number.items() if types[at] == TokenType.NORMAL)
    for token in normal:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair not in named and all(part in normal for part in pair):
                raise _missing(source, f"its tokenizer does not merge {pair[0]!r} and {pair[1]!r}")
    # A character needs no score, because nothing merges into it.
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    return [
        Key("tokenizer.ggml.model", "llama", GGUFValueType.STRING),
        Key("tokenizer.ggml.pre", "default", GGUFValueType.STRING),
        Key("tokenizer.ggml.scores", scores, GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
        Key("tokenizer.ggml.add_space_prefix", _has_space_prefix(saved, source), GGUFValueType.BOOL),
    ]


def _has_space_prefix(saved: Mapping[str, Any], source: str) -> bool:
    """Return True if a text gets a space before its first word; raise if spaces are treated otherwise."""
    normalizer, pre = saved.get("normalizer"), saved.get("pre_tokenizer")
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if pre is None and steps and steps[-1] == replaced and steps[:-1] in ([], [{"type": "Prepend", "prepend": _SPACE}]):
        return len(steps) == 2
    if (
        not steps
        and pre is not None
        and pre["type"] == "Metaspace"
        and not pre["split"]
        and pre["replacement"] == _SPACE
    ):
        return bool(pre["prepend_scheme"] != "never")
    used = ", ".join(each["type"] for each in (*steps, *([pre] if pre else [])))
    raise _missing(source, f"its tokenizer treats spaces otherwise than SentencePiece ({used or 'not at all'})")


def _chat_templates(templates: str | Mapping[str, str] | None, source: str) -> list[Key]:
    """Return the keys of one chat template, or of several by name."""
    text = GGUFValueType.STRING
    if not templates:
        return []
    if isinstance(templates, str):
        return [Key("tokenizer.chat_template", templates, text)]
    names = [name for name in templates if name != "default"]
    if odd := next((name for name in names if not re.fullmatch(r"\w+", name, re.ASCII)), None):
        raise ExportError(
            f"the tokenizer of {source} names a chat template {odd!r} (limit letters, digits and _). Rename it in "
            "`tokenizer.chat_template`"
        )
    keys = [Key(f"tokenizer.chat_template.{name}", templates[name], text) for name in names]
    if names:
        keys.append(Key("tokenizer.chat_templates", names, GGUFValueType.ARRAY, text))
    if "default" in templates:
        keys.append(Key("tokenizer.chat_template", templates["default"], text))
    return keys


def _tokens(
    words: Mapping[str, int], added: list[dict[str, Any]], vocabulary: int, source: str
) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token; rows of the embedding without a token get unused ones."""
    if max(words.values()) >= vocabulary:
        raise ExportError(
            f"the tokenizer of {source} has token {max(words.values())} (limit {vocabulary - 1}, the last row of the "
            "embedding). Use the tokenizer of this model"
        )
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    types = [int(TokenType.UNUSED)] * vocabulary
    for word, number in words.items():
        tokens[number], types[number] = word, int(TokenType.NORMAL)
    for each in added:
        types[each["id"]] = int(TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED)
    return tokens, types


def _pre_tokenizer(saved: Mapping[str, Any], source: str) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a tokenizer.json."""
    model = saved["model"]
    normalizer = saved.get("normalizer")
    steps = _steps(saved.get("pre_tokenizer"))
    name, ignores_merges = _PRE_TOKENIZERS.get(steps, ("", False))
    if not name:
        raise _missing(source, f"llama.cpp's name of its pre-tokenizer is unknown ({', '.join(steps)[:80] or 'none'})")
    if bool(model.get("ignore_merges")) != ignores_merges:
        raise _missing(source, f"its tokenizer has ignore_merges {not ignores_merges}, unlike {name}")
    # llama.cpp normalises no text; NFC leaves nearly all text as it is.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _missing(source, f"its tokenizer normalises text ({normalizer['type']})")
    return name


def _steps(pre: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the steps of a pre-tokenizer; an unknown one as its type."""
    if pre is None:
        return ()
    kind = pre["type"]
    if kind == "Sequence":
        return tuple(step for each in pre["pretokenizers"] for step in _steps(each))
    if kind == "ByteLevel" and not pre["add_prefix_space"]:
        return ("words" if pre["use_regex"] else "bytes",)
    if kind == "Digits" and pre["individual_digits"]:
        return ("digits",)
    if kind == "Split" and pre["behavior"] == "Isolated" and not pre["invert"]:
        return (str(pre["pattern"].get("Regex", kind)),)
    return (kind,)


def _missing(source: str, why: str) -> ExportError:
    return ExportError(
        f"the tokenizer of {source} has no known form in GGUF: {why}. Pass a GGUF file of the original model as "
        "`tokenizer`, and its tokenizer is copied"
    )
