"""Hub names without a hub: an error within seconds, and cached models load all the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headscan.checkpoints.headers import _ask
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_model
from tests.sources import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"

LOAD = """
import logging, sys, time
import headscan
from headscan.errors import HeadscanError
from headscan.checkpoints.sources import load_config, load_tokenizer
from headscan.layers.lazy_model import tensor_files
import headscan.loading, transformers.models.llama.modeling_llama
from headscan.checkpoints import headers as hub
for name in sys.argv[1:]:
    hub._answers.cache_clear()  # every model asks the hub itself
    started = time.monotonic()
    try:
        lm = headscan.load(name, device="cpu")
        tensor_files(name)
        print(lm.grid.shape, lm.revision, end=" ")
    except HeadscanError as problem:
        print(problem, end=" ")
    print(f"after {time.monotonic() - started:.1f}")
from headscan.texts import CorpusError, CorpusSpec, open_corpus
try:
    open_corpus(CorpusSpec("someone/texts"))
except CorpusError as problem:
    print(problem)
"""


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)  # the kernel accepts so many
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing_hub() -> str:
    """An address at which no process listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub with one model, ``someone/cached``."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "hub" / "models--someone--cached"
    make_model("llama", vocabulary=300).save_pretrained(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    make_tokenizer(300).save_pretrained(folder / "snapshots" / COMMIT)
    return home


def outcome(endpoint: str, cache: Path, code: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """Return the output and the log of a program."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PYTHONPATH": str(ROOT), **environment}
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith(("_proxy", "_offline"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**kept, **settings}, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


def seconds(shown: str) -> float:
    return float(shown.rpartition("after ")[2])


def test_a_hub_that_refuses_is_an_error_at_once_unless_the_model_is_cached(refusing_hub: str, cache: Path) -> None:
    lines, said = outcome(refusing_hub, cache, LOAD, "someone/cached", "someone/absent")
    cached, shown, corpus = lines.splitlines()
    assert cached.startswith(f"(3, 6) {COMMIT} "), cached
    assert f"corpus 'someone/texts' is not built in and is no file or folder, and the hub ({refusing_hub})" in corpus
    assert "no model 'someone/absent': there is no such folder" in shown
    assert f"the hub ({refusing_hub}) does not answer. Check the name or the network" in shown
    assert "Retrying" not in said
    assert seconds(shown) < 20  # before: 37 s of retries


@pytest.mark.slow
def test_a_hub_that_never_answers_is_an_error_in_seconds_unless_the_model_is_cached(
    silent_hub: str, cache: Path
) -> None:
    lines, said = outcome(silent_hub, cache, LOAD, "someone/cached", "someone/absent", HF_HUB_ETAG_TIMEOUT="4")
    cached, shown, _ = lines.splitlines()
    assert cached.startswith(f"(3, 6) {COMMIT} "), cached
    assert f"the hub ({silent_hub}) does not answer" in shown
    assert f"waiting up to 4 s for the hub ({silent_hub}) to answer" in said
    assert seconds(shown) < 30  # before: more than 100 s


@pytest.mark.slow
def test_a_host_without_an_address_is_an_error_at_once(cache: Path) -> None:
    shown, _ = outcome("http://hub.invalid", cache, LOAD, "someone/absent")
    assert "the hub (http://hub.invalid) does not answer" in shown


@pytest.mark.slow
def test_offline_mode_sends_no_request(silent_hub: str, cache: Path) -> None:
    shown, said = outcome(silent_hub, cache, LOAD, "someone/absent", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in shown
    assert "waiting" not in said


@pytest.mark.parametrize(("status", "answers"), [("200 OK", True), ("404 Not Found", True), ("503 No", False)])
def test_any_answer_but_a_gateway_s_is_an_answer(status: str, answers: bool) -> None:
    from threading import Thread

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

        serving = Thread(target=serve)
        serving.start()
        assert _ask(f"http://127.0.0.1:{server.getsockname()[1]}", 10) is answers
        serving.join()


def test_a_hub_without_an_http_response_in_time_gives_no_answer(refusing_hub: str, silent_hub: str) -> None:
    assert _ask(silent_hub, 0.2) is False
    assert _ask(refusing_hub, 5) is False
    assert _ask("nonsense://hub", 5) is False
