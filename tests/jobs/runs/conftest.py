"""A scan of five shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headscan.model_spec import ModelSpec
from headscan.steps.scan import Scan
from headscan.texts import CorpusSpec, TokenConfig


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path, tmp_path: Path) -> Scan:
    """A scan of five shards, of a corpus and a model that a test may change."""
    texts = Path(shutil.copytree(corpus_folder, tmp_path / "texts"))
    model = Path(shutil.copytree(spec.source, tmp_path / "tiny-llama"))
    tokens = TokenConfig(20, min_tokens=5)
    return Scan(ModelSpec(str(model)), CorpusSpec(str(texts)), tokens, shard_size=2, statistics=("entropy",))
