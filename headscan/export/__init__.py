"""Models, plans and stores as files for other engines and tools.

`formats` lists the formats with their settings, and writes them. `servable_model` brings a model into one layout of
attention. `gguf_file` and `gguf_tokenizer` write it for llama.cpp; `decilm_folder` and `layer_types_folder` for vLLM
and SGLang, as a `llama_folder`; `vllm_overrides` writes plans by KV head for vLLM.
"""
