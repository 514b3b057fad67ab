"""Checkpoints made at random: transformers takes them as it takes others, and a scan streams through one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headscan
from headscan.errors import ModelLoadError
from tests.benchmarks.random_checkpoint import Shape, main, make_checkpoint

SMALL = Shape(layers=3, hidden=48, mlp=64, heads=6, kv_heads=2, vocabulary=4096)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_whole_and_the_same_for_the_same_seed(dtype: str, tmp_path: Path) -> None:
    total = make_checkpoint(tmp_path / "a", SMALL, dtype)
    make_checkpoint(tmp_path / "b", SMALL, dtype)
    lm, again = (headscan.load(tmp_path / name, device="cpu") for name in "ab")
    weights = lm.model.state_dict()
    assert lm.dtype == dtype
    assert lm.grid.shape == (3, 6)
    assert total == sum(weight.nbytes for weight in weights.values())
    assert all(torch.equal(weights[name], weight) for name, weight in again.model.state_dict().items())
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 5
    assert len(lm.require_tokenizer()) <= SMALL.vocabulary
    assert headscan.collect(lm, torch.arange(20)[None])["entropy"].isfinite().all()


def test_the_command_prints_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(SMALL).items()]
    main([str(tmp_path), *options, "--dtype", "bfloat16"])
    assert "GiB of weights" in capsys.readouterr().out
    with pytest.raises(ModelLoadError, match="unknown dtype 'int3'"):
        main([str(tmp_path), *options, "--dtype", "int3"])
