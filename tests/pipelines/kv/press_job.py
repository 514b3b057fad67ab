"""Generation with the press of a plan, run by an interpreter that has kvpress.

    python -m tests.pipelines.kv.press_job JOB RESULTS

`test_plan_press` starts it, and uses the same functions to generate with a `PlanCache`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

#: (layer, KV head, sink, recent) of each KV head; a head without a window keeps all keys.
Heads = Sequence[tuple[int, int, int | None, int | None]]


def plan_of(heads: Heads) -> Any:
    """Return a plan with these entries."""
    return SimpleNamespace(
        heads=[
            SimpleNamespace(
                layer=layer, kv_head=k, action="full" if recent is None else "window", sink=s, recent=recent
            )
            for layer, k, s, recent in heads
        ]
    )


def load(folder: str) -> PreTrainedModel:
    """Load a model without an end token, so that every text has 20 new tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return 20 greedy tokens with their prompts (B, S), and the logits of each step (20, B, V)."""
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


def main(job_path: str, results_path: str) -> None:
    import kvpress

    from headscan.pipelines.kv.plan_press import plan_press

    def refusal(run: Callable[[], Any]) -> str:
        try:
            run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    results: dict[str, Any] = {"kvpress": kvpress.__file__}
    for name, job in torch.load(job_path).items():
        model, plan, ids = load(job["folder"]), plan_of(job["heads"]), job["ids"]

        def pressed(heads: Heads, model: PreTrainedModel = model, ids: Tensor = ids, **options: Any) -> Any:
            with plan_press(plan_of(heads))(model):
                return generate(model, ids, torch.ones_like(ids), **options)

        with plan_press(plan)(model):
            results[name] = generate(model, ids, job["mask"])
        results[f"{name} in the context only"] = in_context_only(model, plan_press(plan), ids)
        more = [*job["heads"], (99, 0, None, None)]
        refused = {
            "chunks": refusal(lambda run=pressed, job=job: run(job["heads"], prefill_chunk_size=16)),
            "heads": refusal(lambda run=pressed, job=job: run(job["heads"][:-1])),
            "layers": refusal(lambda run=pressed, more=more: run(more)),
            "static": refusal(lambda run=pressed, job=job: run(job["heads"], cache_implementation="static")),
        }
        model.set_attn_implementation("eager")
        refused["eager"] = refusal(lambda run=pressed, job=job: run(job["heads"]))
        results[f"{name} refused"] = refused
    torch.save(results, results_path)


@torch.no_grad()
def in_context_only(model: PreTrainedModel, press: Any, ids: Tensor) -> Tensor:
    """Return the logits (B, V) of a token after the hooks are removed, as in kvpress's own pipeline."""
    with press(model):
        out = model(input_ids=ids[:, :-1], use_cache=True)
    return model(input_ids=ids[:, -1:], past_key_values=out.past_key_values).logits[:, -1]


if __name__ == "__main__":
    main(*sys.argv[1:])
