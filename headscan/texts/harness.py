"""The lm-eval adapter: collects requests, and replays answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from headscan.runs.model_identity import ModelIdentity
from headscan.settings.evaluation_settings import HarnessError
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request, request_hash

#: lm-eval's own default for tasks without a limit.
_MAX_NEW_TOKENS = 256


class HeadscanLM(TemplateLM):
    """The model that lm-eval sees: first it collects requests, then it replays the answers of one arm at a time (by the
    request's hash; None while it collects). Requests that exceed the context (hashes in ``truncated``) lose their
    beginning, as in lm-eval.
    """

    def __init__(self, identity: ModelIdentity, *, bos: str = "auto") -> None:
        super().__init__()
        self.tokenizer: Any = identity.tokenizer
        self._name, self._bos = identity.name, bos
        self.max_length = identity.max_tokens or 4096
        self.requests: dict[str, Request | GenerationRequest] = {}
        self.truncated: set[str] = set()
        self.answers: Mapping[str, LogLikelihood | str] | None = None
        # One object for each token id: millions of equal integers would take gigabytes.
        self._ids: dict[int, int] = {}
        # Keyed by lm-eval's arguments: a text is tokenised once, not once per arm.
        self._pairs: dict[tuple[str, str], str] = {}
        self._asked: dict[tuple[str, str], Instance] = {}
        self._windows: dict[str, list[str]] = {}
        self._prompts: dict[tuple[str, str, int], str] = {}

    @property
    def eot_token_id(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise HarnessError(f"the tokenizer of {self._name} has neither BOS nor EOS to start a prompt. Add one")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not self.tokenizer.chat_template:
            raise HarnessError(f"the tokenizer of {self._name} has no chat template. Omit `apply_chat_template`")
        try:
            return self._chat(chat_history, add_generation_prompt)
        except TemplateError:
            # As in lm-eval: some templates accept no system role, which task descriptions use.
            return self._chat([turn for turn in chat_history if turn["role"] != "system"], add_generation_prompt)

    def _chat(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            # The chat template may already have added BOS.
            add_special_tokens = self._bos != "never" and not (bos and string.startswith(bos))
            if add_special_tokens and self._bos == "always":
                ids = self.tokenizer.encode(string, add_special_tokens=False, verbose=False)
                return [self.prefix_token_id, *ids]
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._asked = {request.args: request for request in requests if request.args not in self._pairs}
        # lm-eval's progress bar would interfere with ours.
        super().loglikelihood(list(self._asked.values()), disable_tqdm=True)
        return [self._likelihood(self._pairs[request.args]) for request in requests]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for pair, context, continuation in requests:
            self._pairs[pair] = self._collect(self._asked[pair], context, continuation)
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        for request in requests:
            (text,) = request.args
            if text not in self._windows:
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                self._windows[text] = [self._collect(request, *make_disjoint_window(window)) for window in windows]
        return [sum(self._likelihood(key)[0] for key in self._windows[request.args[0]]) for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked: Counter[tuple[str, str]] = Counter()
        texts = []
        for request in requests:
            prompt, options = request.args
            key = (prompt, repr(options))
            # Repeated greedy answers are equal; every repetition of a sampled answer is a separate request.
            draw = asked[key] if normalize_gen_kwargs(options, _MAX_NEW_TOKENS)["do_sample"] else 0
            asked[key] += 1
            if (*key, draw) not in self._prompts:
                self._prompts[(*key, draw)] = self._collect_prompt(request, options, draw)
            prompt_hash = self._prompts[(*key, draw)]
            texts.append("" if self.answers is None else str(self.answers[prompt_hash]))
        return texts

    def _likelihood(self, key: str) -> tuple[float, bool]:
        if self.answers is None:
            return 0.0, False
        answer, request = self.answers[key], self.requests[key]
        assert isinstance(answer, LogLikelihood) and isinstance(request, Request)
        return answer.log_likelihood, answer.greedy_tokens == request.scored_tokens

    def _collect(self, asked: Instance, context: list[int], continuation: list[int]) -> str:
        if not continuation or len(continuation) > self.max_length:
            raise HarnessError(
                f"{_place(asked)}: cannot score {asked.args[-1][:40]!r}, which has {len(continuation)} tokens (limits "
                f"1 and {self.max_length}). Correct the document, or use another task"
            )
        # lm-eval moves trailing blanks of a context to the continuation, which may leave the context empty.
        ids = (context or [self.prefix_token_id]) + continuation
        # One token more than the context, since the last one is predicted, not read.
        room = self.max_length + 1
        return self._add(Request(tuple(ids[-room:]), len(continuation)), truncated=len(ids) > room)

    def _collect_prompt(self, asked: Instance, options: dict[str, Any], draw: int) -> str:
        known: dict[str, Any] = dict(normalize_gen_kwargs(options, _MAX_NEW_TOKENS))
        until, tokens = known.pop("until", []), known.pop("max_gen_toks")
        known.pop("max_length", None)
        if not known.get("do_sample"):
            known.pop("temperature", None)
        room = self.max_length - tokens
        if room < 1:
            raise HarnessError(
                f"{_place(asked)}: the task generates up to {tokens} tokens, and {self._name} has {self.max_length} "
                "positions. Use a task that generates less"
            )
        ids = self.tok_encode(asked.args[0])
        if not ids:
            raise HarnessError(
                f"{_place(asked)}: the prompt has 0 tokens (limit 1). Correct the document, or use another task"
            )
        request = GenerationRequest(tuple(ids[-room:]), tuple(until), tokens, tuple(sorted(known.items())), draw)
        return self._add(request, truncated=len(ids) > room)

    def _add(self, request: Request | GenerationRequest, *, truncated: bool) -> str:
        key = request_hash(request)
        self.requests[key] = request._replace(ids=tuple(map(self._ids.setdefault, request.ids, request.ids)))
        if truncated:
            self.truncated.add(key)
        return key


def _place(asked: Instance) -> str:
    """Return task and document of a request of lm-eval."""
    return f"task {asked.task_name}, document {asked.doc_id}"


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Suppress output of lm-eval, datasets and the hub's client, such as retries, except for errors."""
    import datasets
    import lm_eval.api.metrics
    import lm_eval.api.task

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = datasets.utils.logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        datasets.utils.logging.disable_progress_bar()
        # No option disables lm-eval's progress bar of building requests.
        with (
            _replaced(lm_eval.api.task, "tqdm", lambda items, **_: items),
            _replaced(lm_eval.api.metrics, "bootstrap_stderr", _bootstrap_stderr),
        ):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.utils.logging.enable_progress_bar()


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of lm-eval whose output has no option."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def _bootstrap_stderr(f: Callable[[Sequence[Any]], float], xs: Sequence[Any], iters: int) -> float:
    """Return lm-eval's bootstrap error, computed in this process: lm-eval's own function prints, and starts a process
    on every core.
    """
    from lm_eval.api.metrics import _bootstrap_internal, sample_stddev

    return float(sample_stddev(_bootstrap_internal(f, iters)((0, xs))))
