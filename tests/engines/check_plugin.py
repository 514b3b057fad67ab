"""Check the plugin's manager and builder against vLLM's own classes, without an engine.

    python check_plugin.py

It runs in an environment with vLLM for CPUs and headscan-vllm, without headscan. Exits 1 with a traceback if a check
fails; prints the number of checks.
"""

import random

import torch
from headscan_vllm.segments import segment_count, segments
from headscan_vllm.served_plan import WindowRule
from headscan_vllm.window_attention import window_backend
from headscan_vllm.window_cache import WindowHeadsManager, WindowHeadsSpec
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

SIZE = 4


def spec_of(rule: WindowRule) -> WindowHeadsSpec:
    return WindowHeadsSpec(
        block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=rule.recent, rule=rule
    )


def drawn_rule(draw: random.Random) -> WindowRule:
    block = SIZE * draw.choice([1, 2])
    sink, recent = block * draw.choice([0, 1, 2]), draw.randint(1, 20)
    if draw.random() < 0.5:
        return WindowRule.of_tokens(sink, recent, block)
    return WindowRule(sink, recent, block, block * draw.choice([1, 2, 3]))


def needed(rule: WindowRule, position: int) -> set[int]:
    """Return the blocks that a query reads."""
    start = rule.start(position)
    return {key // SIZE for key in range(position + 1) if key < rule.sink or key >= start}


def check_manager(seed: int) -> None:
    """Hold the blocks of a request after each step against those that its queries read, and all against the cap."""
    draw = random.Random(seed)
    rule, most = drawn_rule(draw), 24
    pool = BlockPool(200, False, SIZE)
    spec = spec_of(rule)
    cap = spec.max_admission_blocks_per_request(most, 160)
    manager = WindowHeadsManager(
        spec, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=SIZE
    )
    free, computed = pool.get_num_free_blocks(), 0
    while computed < 150:
        queries = min(draw.choice([1, 1, 3, most]), 150 - computed)
        manager.remove_skipped_blocks("r", computed)
        manager.allocate_new_blocks("r", computed + queries, computed + queries)
        held = {at for at, block in enumerate(manager.req_to_blocks["r"]) if not block.is_null}
        for position in range(computed, computed + queries):
            assert needed(rule, position) <= held, (rule, position)
        assert len(held) <= cap and free - pool.get_num_free_blocks() == len(held), (rule, len(held), cap)
        computed += queries
    manager.free("r")
    assert pool.get_num_free_blocks() == free


def check_hits(seed: int) -> None:
    """Hold the longest hit against a search through all prefixes."""
    draw = random.Random(seed)
    rule, count = drawn_rule(draw), 24
    pool = BlockPool(100, True, SIZE)
    hashes = [bytes([at]) * 8 for at in range(count)]
    cached = {at for at in range(count) if draw.random() < draw.choice([0.6, 0.95])}
    for at in cached:
        key = make_block_hash_with_group_id(hashes[at], 0)
        pool.cached_block_hash_to_block.insert(key, pool.get_new_blocks(1)[0])
    alignment = SIZE * draw.choice([1, 2])
    (hit,), length = WindowHeadsManager.find_longest_cache_hit(
        hashes, count * SIZE - 1, [0], pool, spec_of(rule), False, alignment
    )
    fits = [
        tokens
        for tokens in range(0, count * SIZE - 1, alignment)
        if {at for at in range(tokens // SIZE) if at * SIZE < rule.sink or at * SIZE >= rule.start(tokens)} <= cached
    ]
    assert length == max(fits) and len(hit) * SIZE == length, (rule, length, max(fits))
    held = {at for at, block in enumerate(hit) if not block.is_null}
    assert needed(rule, length) - {length // SIZE} <= held <= cached


def check_flash_attention() -> None:
    """Hold the tensors of FlashAttention's builder against the segments, and its blocks after an update."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    rule = WindowRule.of_tokens(SIZE, 9, SIZE)
    builder = object.__new__(window_backend(FlashAttentionBackend, rule).get_builder_cls())
    facts = {"aot_schedule": False, "aot_sliding_window": (-1, -1), "use_full_cuda_graph": False, "dcp_world_size": 1}
    builder.__dict__ |= facts | {"rswa_window": None, "mm_prefix_query_ranges_np": None, "kv_cache_spec": spec_of(rule)}
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    assert not builder.use_cascade_attention()
    starts, lengths = torch.tensor([0, 1, 18], dtype=torch.int32), torch.tensor([30, 40], dtype=torch.int32)
    tables = [torch.randperm(40).view(2, 20).int() for _ in range(2)]
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=2,
        num_actual_tokens=18,
        max_query_len=17,
        max_seq_len=40,
        block_table_tensor=tables[0],
        slot_mapping=torch.arange(18),
        seq_lens_cpu_upper_bound=lengths,
    )
    metadata = builder.build(5, step)
    count = segment_count(starts[1:] - starts[:-1], rule.chunk)
    made = segments(starts, lengths, 20, rule, block_size=SIZE, count=count)
    for table in tables:
        assert torch.equal(metadata.block_table, made.table(table))
        assert torch.equal(metadata.seq_lens, made.lengths) and torch.equal(metadata.query_start_loc, made.query_start)
        assert metadata.max_seq_len == rule.most_tokens >= int(made.lengths.max())
        assert metadata.max_query_len == rule.chunk and metadata.num_actual_tokens == 18
        metadata = builder.update_block_table(metadata, tables[1], step.slot_mapping)


def check_version() -> None:
    """An untried version is refused in one line that names the tried ones."""
    import headscan_vllm
    import vllm

    tried, vllm.__version__ = vllm.__version__, "0.99.0"
    try:
        headscan_vllm.register()
    except RuntimeError as problem:
        assert str(problem).startswith(f"headscan-vllm was tried with vLLM {headscan_vllm.TRIED[0]}; this is 0.99.0. ")
        assert "\n" not in str(problem)
    else:
        raise AssertionError("an untried version was accepted")
    finally:
        vllm.__version__ = tried
    headscan_vllm.register()
    headscan_vllm.register()  # vLLM may call it again


if __name__ == "__main__":
    for seed in range(200):
        check_manager(seed)
        check_hits(seed)
    check_flash_attention()
    check_version()
    print("402 checks passed")
