"""Ask vLLM for log-probabilities after each prefix of token ids, for greedy tokens, and for the room in its cache.

A request with ``requests``, pairs of token ids and a number, asks for the log-likelihood of so many last tokens; one
with ``rounds`` asks how long the prompt ``ids`` takes, and each of ``greedy`` tokens after it.

    python ask_vllm.py FOLDER REQUEST.json ANSWER.json

It runs in an environment with vLLM for CPUs and without headscan.
"""

import json
import os
import sys
import time
from pathlib import Path

#: Environment of vLLM's process; its KV cache has 1 GiB.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: str, request_file: str, answer_file: str) -> None:
    os.environ |= SETTINGS
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    engine = LLM(
        model=folder,
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=request.get("tokens", 256),
        max_logprobs=request["candidates"],
        max_num_seqs=4,
        enable_prefix_caching="rounds" not in request,
    )
    if "rounds" in request:
        prompt, new = [{"prompt_token_ids": request["ids"]}], request["greedy"]

        def seconds(tokens: int) -> float:
            began = time.perf_counter()
            engine.generate(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
            return time.perf_counter() - began

        pairs = [(seconds(1), seconds(1 + new)) for _ in range(1 + request["rounds"])][1:]
        answer = {
            "prefill_seconds": [prefill for prefill, _ in pairs],
            "token_seconds": [(both - prefill) / new for prefill, both in pairs],
        }
        Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")
        return
    if "requests" in request:
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": ids} for ids, _ in request["requests"]]
        sums = [
            sum(row[token].logprob for row, token in zip(found.prompt_logprobs[-scored:], ids[-scored:], strict=True))
            for found, (ids, scored) in zip(engine.generate(prompts, asked), request["requests"], strict=True)
        ]
        Path(answer_file).write_text(json.dumps({"log_likelihoods": sums}), encoding="utf-8")
        return
    asked = SamplingParams(
        temperature=0, max_tokens=request["greedy"], prompt_logprobs=request["candidates"], ignore_eos=True
    )
    [found] = engine.generate([{"prompt_token_ids": request["ids"]}], asked)
    cache = engine.llm_engine.vllm_config.cache_config
    answer = {
        # The first token has no prefix.
        "log_probabilities": [
            {token: each.logprob for token, each in row.items()} for row in found.prompt_logprobs[1:]
        ],
        "greedy": list(found.outputs[0].token_ids),
        "tokens_that_fit": (cache.num_gpu_blocks or 0) * cache.block_size,
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
