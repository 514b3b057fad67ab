"""The KV cache of windowed heads: a spec, and the manager that keeps the blocks of first tokens and of the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from headscan_vllm.served_plan import WindowRule


@dataclass(frozen=True, kw_only=True)
class WindowHeadsSpec(SlidingWindowSpec):
    """The cache of KV heads that keep the first tokens and a window."""

    rule: WindowRule

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        # The chunk of the next query may have begun before the tokens in flight.
        tokens = self.rule.most_tokens + self.extra_retained_tokens + max_in_flight_tokens
        return -(-min(tokens, max_model_len) // self.block_size)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, WindowHeadsSpec) and spec.rule == self.rule for spec in kv_cache_specs.values())


class WindowHeadsManager(SlidingWindowManager):
    """Frees the blocks between the first tokens and the window."""

    def __init__(self, kv_cache_spec: WindowHeadsSpec, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self.rule = kv_cache_spec.rule
        if self.rule.block % self.block_size:
            raise ValueError(
                f"vLLM made blocks of {self.block_size} tokens for windowed KV heads (limit: a part of"
                f" {self.rule.block}, the plan's block). Serve the plan without a draft model"
            )

    @property
    def _first_blocks(self) -> int:
        return self.rule.sink // self.block_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the tokens before the window, or 0 as long as none of them is freed."""
        start = self.rule.start(max(0, num_computed_tokens - self.extra_retained_tokens))
        return start if start > self.rule.sink else 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        skipped = self.get_num_skipped_tokens(processed_computed_tokens)
        self._remove_blocks_in_range(request_id, self._first_blocks, skipped // self.block_size)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *rest: Any, **others: Any
    ) -> int:
        # The base counts the blocks of a hit that it takes, without those before the window.
        count = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *rest, **others)
        taken = self._taken_before_window(new_computed_blocks)
        return int(count) + self._get_num_evictable_blocks(taken)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        if taken := self._taken_before_window(new_computed_blocks):
            self.block_pool.touch(taken)
            self.req_to_blocks[request_id][: len(taken)] = taken

    def _taken_before_window(self, hit: Sequence[KVCacheBlock]) -> Sequence[KVCacheBlock]:
        """Return the blocks of the first tokens of a hit, if the window begins after them."""
        return hit[: self._first_blocks] if self.get_num_skipped_tokens(len(hit) * self.block_size) else ()

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        assert isinstance(kv_cache_spec, WindowHeadsSpec) and not drop_eagle_block
        size, rule = kv_cache_spec.block_size, kv_cache_spec.rule
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        found: list[list[KVCacheBlock] | None] = []
        runs = [0]
        for place in range(max_length // size):
            cached = block_pool.get_cached_block(hashes[place], kv_cache_group_ids)
            if place < rule.sink // size and not cached:
                break  # a longer prefix lacks one of its first blocks
            found.append(cached)
            runs.append(runs[-1] + 1 if cached else 0)
        length = _longest(runs, rule, size, alignment_tokens)
        window = rule.start(length * size) // size
        hit: tuple[list[KVCacheBlock], ...] = tuple([block_pool.null_block] * length for _ in kv_cache_group_ids)
        for place in range(length):
            if place < rule.sink // size or place >= window:
                for blocks, block in zip(hit, found[place] or (), strict=True):
                    blocks[place] = block
        return hit, length * size

    @classmethod
    def reachable_block_mask(cls, *_: Any, **__: Any) -> list[bool] | None:
        """Return None: every block can be a part of a hit."""
        return None


def _longest(runs: Sequence[int], rule: WindowRule, size: int, alignment: int) -> int:
    """Return the most blocks of a prefix whose window is cached. ``runs`` has the number of cached blocks in a row
    before each place.
    """
    for length in range(len(runs) - 1, 0, -1):
        if length * size % alignment == 0 and runs[length] >= length - rule.start(length * size) // size:
            return length
    return 0


def register_window_cache() -> None:
    """Make the spec and its manager known to vLLM."""
    # The registry fills itself with vLLM's own specs only as long as it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WindowHeadsSpec, WindowHeadsManager, uniform_type_base_spec=WindowHeadsSpec)
