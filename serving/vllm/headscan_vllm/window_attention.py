"""Attention modules of a part of a layer's KV heads.

Shapes: N tokens, K KV heads, G query heads of a KV head, D width of a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    subclass_attention_backend,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, get_kv_quant_mode

from headscan_vllm.segments import segment_count, segments
from headscan_vllm.served_plan import ServedPlanError, WindowRule, modules_of
from headscan_vllm.window_cache import WindowHeadsSpec

#: Backends whose kernels read each sequence by its own row of the block table. That of CPUs was tried; no GPU was.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


@lru_cache
def window_backend(backend: Any, rule: WindowRule) -> type[AttentionBackend]:
    """Return a backend whose kernels read the first tokens and the window alone."""
    builder: Any = backend.get_builder_cls()

    class WindowHeadsBuilder(builder):
        """Gives the kernel segments in place of requests."""

        @classmethod
        def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
            # The number of segments depends on the step, as that of vLLM's own chunked local attention does.
            return AttentionCGSupport.NEVER

        def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
            return False

        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            step = common_attn_metadata
            block_size, width = self.kv_cache_spec.block_size, step.block_table_tensor.shape[1]
            starts = step.query_start_loc_cpu
            count = segment_count(starts[1:] - starts[:-1], rule.chunk)
            made = segments(step.query_start_loc, step.seq_lens, width, rule, block_size=block_size, count=count)
            most = min(step.max_seq_len, rule.most_tokens)
            metadata = super().build(
                0,
                step.replace(
                    query_start_loc=made.query_start,
                    query_start_loc_cpu=_on_cpu(step, width, rule, block_size, count, made.query_start),
                    seq_lens=made.lengths,
                    seq_lens_cpu_upper_bound=torch.full((count,), most, dtype=torch.int32),
                    num_reqs=count,
                    max_query_len=min(step.max_query_len, rule.chunk),
                    max_seq_len=most,
                    block_table_tensor=made.table(step.block_table_tensor),
                    is_prefilling=None,
                    req_idx=None,
                    _num_computed_tokens_cache=None,
                    _token_to_req_indices_cache=None,
                ),
                # FlashAttention's schedule ahead of time has a buffer for requests, of which segments are more.
                fast_build=True,
            )
            metadata.window_segments = made
            return metadata

        def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
            return super().update_block_table(metadata, metadata.window_segments.table(blk_table), slot_mapping)

    name = f"WindowHeads_{rule.sink}_{rule.recent}_{rule.block}_{rule.chunk}_"
    return subclass_attention_backend(name, backend, WindowHeadsBuilder)


def _on_cpu(
    step: CommonAttentionMetadata, width: int, rule: WindowRule, block_size: int, count: int, on_device: Tensor
) -> Tensor:
    """Return the first queries of the segments on the CPU, from the copies that vLLM keeps there."""
    if on_device.device.type == "cpu":
        return on_device
    lengths = step.seq_lens_cpu_upper_bound
    assert lengths is not None
    return segments(step.query_start_loc_cpu, lengths, width, rule, block_size=block_size, count=count).query_start


class WindowHeads(Attention):
    """Attention of KV heads that keep the first tokens and a window."""

    def __init__(self, *, rule: WindowRule, frees: bool, attn_backend: Any, **others: Any) -> None:
        """Set the window; ``frees`` is False if the cache keeps the blocks that the window has left."""
        super().__init__(attn_backend=window_backend(attn_backend, rule), **others)
        self.rule, self.frees = rule, frees

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        if not self.frees:
            return super().get_kv_cache_spec(vllm_config)
        return WindowHeadsSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=self.kv_cache_torch_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
            sliding_window=self.rule.recent,
            rule=self.rule,
        )


class HeadModules(nn.Module):
    """The attention of a layer as modules of its KV heads, in place of one module of all heads."""

    order: Tensor | None
    place: Tensor | None

    def __init__(
        self,
        whole: Attention,
        row: tuple[int, ...],
        size: int,
        rules: dict[int, WindowRule],
        freeing: Container[tuple[int, int]],
        vllm_config: VllmConfig,
    ) -> None:
        """Take the place of ``whole``, which is removed from vLLM's list of attention modules.

        Args:
            row: What each KV head keeps, 0 or a key of ``rules``.
            size: KV heads of a module.
            freeing: Kind and number within the kind of the modules of this layer that free blocks.
        """
        super().__init__()
        _check(whole, row)
        made = modules_of(row, size)
        heads = [head for _, part in made for head in part]
        self.kv_heads = whole.num_kv_heads
        self.sizes = [size] * len(made)
        identity = heads == list(range(len(heads)))
        # Tokens are gathered by head only if the heads of a module are no neighbours.
        self.register_buffer("order", None if identity else torch.tensor(heads), persistent=False)
        self.register_buffer("place", None if identity else torch.tensor(heads).argsort(), persistent=False)
        del vllm_config.compilation_config.static_forward_context[whole.layer_name]
        self.parts = nn.ModuleList()
        group = whole.num_heads // whole.num_kv_heads
        counts: Counter[int] = Counter()
        for kept, part in made:
            number = counts[kept]
            counts[kept] += 1
            arguments: dict[str, Any] = {
                "num_heads": group * len(part),
                "head_size": whole.head_size,
                "scale": whole.impl.scale,
                "num_kv_heads": len(part),
                "cache_config": vllm_config.cache_config,
                "quant_config": whole.quant_config,
                "per_layer_sliding_window": whole.sliding_window,
                # The same name has the same spec on all ranks.
                "prefix": f"{whole.layer_name}.{f'window{kept}' if kept else 'full'}_{number}",
                "attn_backend": whole.attn_backend,
                "head_size_v": whole.head_size_v,
            }
            if kept:
                arguments |= {"rule": rules[kept], "frees": (kept, number) in freeing}
            self.parts.append((WindowHeads if kept else Attention)(**arguments))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output (N, K * G * D) of queries (N, K * G * D), keys and values (N, K * D)."""
        parts = [self._of_modules(each, self.order) for each in (query, key, value)]
        outputs = [module(*each) for module, each in zip(self.parts, zip(*parts, strict=True), strict=True)]
        output = torch.cat(outputs, -1)
        if self.place is None:
            return output
        return output.unflatten(-1, (self.kv_heads, -1)).index_select(1, self.place).flatten(1)

    def _of_modules(self, x: Tensor, order: Tensor | None) -> tuple[Tensor, ...]:
        width = x.shape[-1] // self.kv_heads
        if order is not None:
            x = x.unflatten(-1, (self.kv_heads, width)).index_select(1, order).flatten(1)
        return x.split([size * width for size in self.sizes], dim=-1)


def _check(whole: Attention, row: tuple[int, ...]) -> None:
    """Raise ServedPlanError if the attention of a layer cannot be cut into modules."""
    problem = None
    if whole.attn_type != AttentionType.DECODER:
        problem = "is not causal"
    elif whole.kv_sharing_target_layer_name is not None:
        problem = "reads the cache of another layer"
    elif whole.has_sink or getattr(whole.impl, "alibi_slopes", None) is not None:
        problem = "has attention sinks or position biases of its own"
    elif getattr(whole.impl, "logits_soft_cap", None):
        problem = "caps its logits"
    elif hasattr(whole, "quant_method"):
        problem = "has scales of the KV cache in its checkpoint"
    elif any(row) and whole.sliding_window is not None:
        problem = f"sees {whole.sliding_window} tokens already"
    elif whole.attn_backend.get_name() not in BACKENDS:
        problem = f"runs with {whole.attn_backend.get_name()}, not with {' or '.join(BACKENDS)}"
    if problem:
        raise ServedPlanError(
            f"{whole.layer_name} cannot have a plan by KV head: it {problem}. Serve this model without the plan"
        )
