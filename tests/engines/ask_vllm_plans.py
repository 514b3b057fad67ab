"""Ask vLLM with several settings of the engine, one after the other, in one process.

    python ask_vllm_plans.py REQUEST.json ANSWER.json

The request lists engines: ``model``, ``settings`` of `vllm.LLM`, and ``asks``. An ask has ``prompts`` of token ids,
``sampling`` parameters or a list of them, one for each prompt, and ``together``; False asks one prompt after the other.
The answer has for each engine the room in its cache, counters, and for each ask the answers, with the seconds until the
first token and from there to the last one; ``error`` is the message of an exception.

It runs in an environment with vLLM for CPUs and without headscan.
"""

import gc
import json
import os
import sys
from pathlib import Path

#: Settings of every engine unless its own replace them.
SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}


def answers_of(engine, ask: dict) -> dict:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
    given = ask["sampling"] if isinstance(ask["sampling"], list) else [ask["sampling"]] * len(prompts)
    sampling = [SamplingParams(**{"temperature": 0, "ignore_eos": True, **each}) for each in given]
    if ask.get("together", True):
        found = engine.generate(prompts, sampling, use_tqdm=False)
    else:
        pairs = zip(prompts, sampling, strict=True)
        found = [engine.generate([prompt], [each], use_tqdm=False)[0] for prompt, each in pairs]
    rows = []
    for each in found:
        output = each.outputs[0]
        row = {"tokens": list(output.token_ids), "cached": each.num_cached_tokens}
        if each.metrics is not None:
            row["prompt_seconds"] = each.metrics.first_token_latency
            row["token_seconds"] = each.metrics.last_token_ts - each.metrics.first_token_ts
        if output.logprobs is not None:
            row["log_probabilities"] = [{token: at.logprob for token, at in each.items()} for each in output.logprobs]
        rows.append(row)
    return {"answers": rows}


def ask_engine(request: dict) -> dict:
    from vllm import LLM

    engine = LLM(model=request["model"], **SETTINGS | request.get("settings", {}))
    asks = [answers_of(engine, ask) for ask in request["asks"]]
    cache = engine.llm_engine.vllm_config.cache_config
    counters = {each.name: each.value for each in engine.get_metrics() if hasattr(each, "value")}
    capacity = {
        "tokens_that_fit": getattr(cache, "kv_cache_size_tokens", None),
        "concurrency": getattr(cache, "kv_cache_max_concurrency", None),
    }
    engine.llm_engine.engine_core.shutdown()
    return {"asks": asks, "counters": counters, **capacity}


def main(request_file: str, answer_file: str) -> None:
    from ask_vllm import SETTINGS as environment

    os.environ |= environment
    answers = []
    for request in json.loads(Path(request_file).read_text(encoding="utf-8"))["engines"]:
        try:
            answers.append(ask_engine(request))
        except Exception as problem:  # the next engine is asked all the same, and the caller reads the error
            answers.append({"error": str(problem).strip()})
        gc.collect()
        Path(answer_file).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
