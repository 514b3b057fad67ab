"""`headscan generate`: both texts with their costs, the first difference, and one line for each error."""

from __future__ import annotations

import io
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache

import headscan
from headscan.cli.main import main
from headscan.cluster.placement_base import format_bytes
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import PlannedModel, planned_bytes
from headscan.runs.model_identity import identify
from headscan.steps import run_generate as pipeline
from headscan.steps.generate import Generate
from headscan.steps.run_generate import Generated, GenerationTask, compare_generation
from headscan.text_tables import percent
from tests.instrument.kv.cache_plans import NARROW, random_plan
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import TEXTS, make_tokenizer
from tests.jobs.engine.test_eviction import greedy
from tests.jobs.steps.kv_plans import model_of, plan_for
from tests.small_models import make_loaded, make_model

NEW = 12


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXTS[2])
    return file


def command(spec: ModelSpec, plan: Path, prompt: Path, *words: object) -> list[str]:
    options = ["--device", "cpu", "--plan", plan, "--prompt-file", prompt, "--max-new-tokens", NEW, *words]
    return ["generate", spec.source, *map(str, options)]


def test_both_texts_are_printed_with_their_costs(
    spec: ModelSpec,
    lm: LoadedModel,
    model: PlannedModel,
    prompt: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_for(model, 5)
    path = plan.save(tmp_path / "p.json")
    ids = tuple(lm.require_tokenizer()(TEXTS[2])["input_ids"])
    texts = [greedy(lm, each, "forward", ids, NEW) for each in (plan_for(model, 0), plan)]
    different = next(i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b)
    # The last token is generated, but never read.
    held = [planned_bytes(each, len(ids) + NEW - 1) for each in (plan_for(model, 0), plan)]
    printed = []
    for words in ((), ("--prefill-chunk", 7), ("--rounds", 2)):
        assert main(command(spec, path, prompt, *words)) == 0
        printed.append(capsys.readouterr().out)
        head, *written = re.split(r"\n--- (?:full cache|plan)\n", printed[-1])
        lines = head.splitlines()
        assert lines[0] == f"prompt of {len(ids)} tokens, {NEW} new"
        for line, name, size in zip(lines[2:4], ("full cache ", "plan       "), held, strict=True):
            assert re.fullmatch(
                re.escape(f"{name}{format_bytes(size)} of KV cache, ")
                + r"\d+\.\d\d s to the first token, \d+\.\d ms per token",
                line,
            )
        assert lines[4] == f"the plan's cache has {percent(held[1] / held[0])} of the bytes"
        assert lines[5] == f"the texts differ from token {different + 1} on"
        assert len(written) == 2 and written[0] != written[1]
        assert written[0].strip() and printed[-1].split("--- full")[1] == printed[0].split("--- full")[1]


def test_a_chat_template_and_standard_input(
    spec: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of a chat is the message in the tokenizer's own template."""
    folder = shutil.copytree(spec.source, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}it:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    lm, chat, plan = headscan.load(folder), ModelSpec(str(folder)), tmp_path / "p.json"
    plan_for(model_of(chat, lm), 0).save(plan)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXTS[2]}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    config = Generate(chat, plan=plan_for(model_of(chat, lm), 0), prompt=TEXTS[2], apply_chat_template=True)
    assert config.prompt_ids(identify(chat)) == tuple(ids)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXTS[2].encode(encoding))))
        assert main(command(chat, plan, Path("-"), "--apply-chat-template")) == 0
        assert capsys.readouterr().out.startswith(f"prompt of {len(ids)} tokens, ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode("latin-1"))))
    fails(capsys, command(spec, plan, Path("-")), "cannot read standard input ('utf-8' codec can't decode byte 0xe9")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some text")))
    fails(
        capsys,
        command(spec, plan, Path("-"), "--apply-chat-template"),
        "has no chat template. Load a chat model, or leave out --apply",
    )
    tokenizer.chat_template = "{{ raise_exception('no ' * 300) }}"
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some text")))
    fails(
        capsys,
        command(chat, plan, Path("-"), "--apply-chat-template"),
        "cannot be used: no no no",
        "Correct it, or leave out --apply-chat-template",
    )


def test_a_plan_of_full_heads_writes_the_same_text(
    spec: ModelSpec, model: PlannedModel, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_for(model, 0).save(tmp_path / "p.json")
    assert main(command(spec, path, prompt)) == 0
    out = capsys.readouterr().out
    assert "the texts are equal\n" in out and "has 100 % of the bytes" in out
    _, full, planned = re.split(r"\n--- (?:full cache|plan)\n", out)
    assert full.strip() == planned.strip() != ""


def test_what_a_user_can_get_wrong(
    spec: ModelSpec, model: PlannedModel, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(model, 2).save(tmp_path / "p.json")
    other = replace(plan_for(model, 2), model=replace(model, config_hash="c0ffee")).save(tmp_path / "o.json")
    (tmp_path / "long.txt").write_text(TEXTS[0] * 80)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\xd8")
    cases = [
        (command(spec, plan, tmp_path / "none.txt"), "cannot read", "none.txt", "Name a UTF-8 text file"),
        (command(spec, plan, tmp_path / "binary.txt"), "cannot read", "binary.txt"),
        (command(spec, plan, tmp_path / "long.txt"), "12 new ones are", "(limit 1024, the model's context)"),
        (command(spec, tmp_path / "none.json", prompt), "none.json"),
        (command(spec, other, prompt), "made for tiny-llama with another configuration hash"),
        (command(spec, plan, prompt, "--placement", "streamed"), "--placement whole or --placement sharded"),
    ]
    for words, *expected in cases:
        capsys.readouterr()
        assert main(words) == 2, words
        out, err = capsys.readouterr()
        last = err.strip().splitlines()[-1]
        assert last.startswith("headscan: ") and "Traceback" not in err and out == ""
        for part in expected:
            assert part in last, last


def test_an_empty_prompt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "without-bos"
    make_model("llama", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300, bos=False).save_pretrained(folder)
    spec = ModelSpec(str(folder))
    plan = plan_for(model_of(spec, headscan.load(spec.source)), 2).save(tmp_path / "p.json")
    (tmp_path / "empty.txt").write_text("")
    assert main(command(spec, plan, tmp_path / "empty.txt")) == 2
    assert "the prompt has 0 tokens (limit 1). Give a prompt with text" in capsys.readouterr().err.splitlines()[-1]


def test_models_with_soft_caps_and_learned_sinks_generate_too() -> None:
    for family in ("gpt_oss", "gemma2-softcap"):
        lm = make_loaded(family)
        kept = random_plan(lm, (NARROW,)).kept
        ids = tuple(torch.randint(2, 90, (30,), generator=torch.Generator().manual_seed(0)).tolist())
        found = compare_generation(lm, GenerationTask(kept, ids, 6))
        assert found.planned.cache_bytes < found.full.cache_bytes
        with torch.no_grad():
            out = lm.model.generate(  # type: ignore[operator]
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                past_key_values=DynamicCache(config=lm.model.config),
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
            )
        assert found.full.tokens == tuple(out[0, len(ids) :].tolist())


def test_both_caches_warm_up_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[str, int]] = []

    def recorded(lm: LoadedModel, task: GenerationTask, cache: Cache) -> Generated:
        passes.append((type(cache).__name__, task.max_new_tokens))
        return Generated((1,), 1, 0.1, None, None, "a")

    monkeypatch.setattr(pipeline, "_generate", recorded)
    lm = make_loaded("llama")
    compare_generation(lm, GenerationTask(random_plan(lm, (NARROW,)).kept, (2, 3, 4), 6))
    assert passes == [("DynamicCache", 2), ("PlanCache", 2), ("DynamicCache", 6), ("PlanCache", 6)]
