"""Models of vLLM whose attention keeps a plan. All code but that of the attention modules is vLLM's own."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.nemotron_nas import DeciLMForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from headscan_vllm.served_plan import PREFIX, ServedPlan, ServedPlanError
from headscan_vllm.window_attention import HeadModules

logger = init_logger(f"vllm.{__name__}")


def keep_plan(model: Any, vllm_config: VllmConfig) -> None:
    """Replace the attention module of each layer by modules of KV heads that keep the same tokens.

    Raises:
        ServedPlanError: The plan is damaged or for another model, or the engine's settings exclude plans.
    """
    config = vllm_config.model_config.hf_config
    plan = ServedPlan.read(getattr(config, "head_plan", None))
    plan.check_model(config)
    _check_engine(vllm_config)
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    size = plan.heads_per_module(ranks)
    rules = {kept: plan.rule(kept, vllm_config.cache_config.block_size) for kept in range(1, 1 + len(plan.windows))}
    layers = {
        extract_layer_index(module.attn.layer_name): module
        for module in model.modules()
        if isinstance(getattr(module, "attn", None), Attention)
    }
    for layer, row in enumerate(plan.heads):
        if row and layer not in layers:
            raise ServedPlanError(f"layer {layer} of this model has no attention. Make a plan for this model")
    held = vllm_config.max_in_flight_tokens
    longest = vllm_config.model_config.max_model_len
    tokens = {0: longest} | {kept: min(longest, rule.most_tokens + held) for kept, rule in rules.items()}
    freeing = plan.freeing_modules(size, ranks, tokens)
    for layer, module in layers.items():
        row = plan.row(layer, module.attn.num_kv_heads, rank, ranks)
        module.attn = HeadModules(module.attn, row, size, rules, freeing[layer], vllm_config)
    kept = [each for row in plan.heads for each in row]
    logger.info(
        "%d of %d KV heads keep a window; %d KV heads an attention module, of which %d free blocks",
        sum(map(bool, kept)),
        len(kept),
        size,
        sum(map(len, freeing)),
    )


def _check_engine(vllm_config: VllmConfig) -> None:
    """Raise ServedPlanError if a setting of the engine was not tried with plans, or undoes them."""
    speculation = vllm_config.speculative_config
    problem = None
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        problem = "one table of blocks for all KV heads saves nothing. Serve without --disable-hybrid-kv-cache-manager"
    elif vllm_config.kv_transfer_config is not None:
        problem = "transfer of the KV cache was not tried. Serve without --kv-transfer-config"
    elif speculation is not None and speculation.method != "ngram":
        problem = f"speculation by {speculation.method} was not tried. Use ngram"
    elif vllm_config.parallel_config.pipeline_parallel_size > 1:
        problem = "pipeline parallelism was not tried. Serve without --pipeline-parallel-size"
    elif vllm_config.parallel_config.decode_context_parallel_size > 1:
        problem = "context parallelism was not tried. Serve without --decode-context-parallel-size"
    if problem:
        raise ServedPlanError(f"a plan by KV head: {problem}")


def with_plan(base: Any) -> Any:
    """Return a model's class whose attention keeps the plan of its configuration."""

    class Planned(base):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            keep_plan(self, vllm_config)

    Planned.__name__ = Planned.__qualname__ = PREFIX + base.__name__
    return Planned


HeadPlanLlamaForCausalLM = with_plan(LlamaForCausalLM)
HeadPlanMistralForCausalLM = with_plan(MistralForCausalLM)
HeadPlanQwen2ForCausalLM = with_plan(Qwen2ForCausalLM)
HeadPlanQwen3ForCausalLM = with_plan(Qwen3ForCausalLM)
HeadPlanDeciLMForCausalLM = with_plan(DeciLMForCausalLM)
