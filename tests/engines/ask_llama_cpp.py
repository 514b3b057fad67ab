"""Ask llama.cpp for log-probabilities after each prefix of token ids, and for greedy tokens.

A request with ``requests``, pairs of token ids and a number, asks for the log-likelihood of so many last tokens; one
with ``rounds`` asks how long the prompt ``ids`` takes, and each of ``greedy`` tokens after it.

    python ask_llama_cpp.py MODEL.gguf REQUEST.json ANSWER.json

It runs in an environment with xllamacpp and without headscan. The KV cache is float32, as in the model that it is
compared with; the times are those of llama.cpp's own defaults.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import xllamacpp


def main(model: str, request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.n_ctx = request.get("tokens", 512)
    settings.n_parallel, settings.verbosity = 1, -1
    settings.warmup = settings.ctx_shift = False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = os.cpu_count() or 1
    if "rounds" not in request:
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)

    def complete(prompt: list[int], tokens: int, candidates: int) -> dict:
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "n_probs": candidates,
            "temperature": 0.0,
            "cache_prompt": "rounds" not in request,
            "ignore_eos": True,
        }
        address = f"{server.listening_address}/completion"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)

    if "rounds" in request:
        asked = [complete(request["ids"], request["greedy"], 0)["timings"] for _ in range(1 + request["rounds"])][1:]
        found = {
            "prefill_seconds": [each["prompt_ms"] / 1000 for each in asked],
            "token_seconds": [each["predicted_per_token_ms"] / 1000 for each in asked],
        }
        Path(answer_file).write_text(json.dumps(found), encoding="utf-8")
        return

    def candidates_of(prompt: list[int], tokens: int, candidates: int) -> list[dict]:
        return complete(prompt, tokens, candidates)["completion_probabilities"]

    if "requests" in request:
        rows_by_prefix: dict[tuple[int, ...], dict[int, float]] = {}
        sums = []
        for ids, scored in request["requests"]:
            total = 0.0
            for end in range(len(ids) - scored, len(ids)):
                prefix = tuple(ids[:end])
                if prefix not in rows_by_prefix:
                    [row] = candidates_of(ids[:end], 1, request["candidates"])
                    rows_by_prefix[prefix] = {each["id"]: each["logprob"] for each in row["top_logprobs"]}
                total += rows_by_prefix[prefix][ids[end]]
            sums.append(total)
        Path(answer_file).write_text(json.dumps({"log_likelihoods": sums}), encoding="utf-8")
        return
    ids = request["ids"]
    rows = [candidates_of(ids[:end], 1, request["candidates"])[0]["top_logprobs"] for end in range(1, len(ids) + 1)]
    found = {
        "log_probabilities": [{each["id"]: each["logprob"] for each in row} for row in rows],
        "greedy": [each["id"] for each in candidates_of(ids, request["greedy"], 1)],
    }
    Path(answer_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the server's thread does not end by itself
