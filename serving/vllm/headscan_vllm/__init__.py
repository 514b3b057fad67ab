"""A plugin of vLLM that serves plans by KV head: some KV heads keep all tokens, others the first ones and a window.

Each kind of KV heads of a layer is an attention module of its own, so vLLM's cache manager gives it blocks of its own.
Model files stay as they are: ``headscan export vllm`` writes the fields that ``vllm serve MODEL --hf-overrides`` reads.
"""

from headscan_vllm.served_plan import ARCHITECTURES, PREFIX

#: Versions of vLLM that the plugin was tried with. It uses interfaces that change between versions.
TRIED = ("0.32.0",)


def register() -> None:
    """Make the models with plans and their KV cache known to vLLM, which calls this in each of its processes.

    Raises:
        RuntimeError: Another version of vLLM than the tried ones.
    """
    import vllm

    version = vllm.__version__.partition("+")[0]
    if version not in TRIED:
        raise RuntimeError(
            f"headscan-vllm was tried with vLLM {', '.join(TRIED)}; this is {version}. Install a tried version, or"
            " uninstall headscan-vllm"
        )
    from headscan_vllm.window_cache import register_window_cache

    register_window_cache()
    for architecture in ARCHITECTURES:
        name = PREFIX + architecture
        vllm.ModelRegistry.register_model(name, f"headscan_vllm.models:{name}")
