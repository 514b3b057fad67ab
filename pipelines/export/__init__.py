"""Models as files that other engines serve.

`servable_model` brings a model into one layout of attention. `gguf_file` and `gguf_tokenizer` write it for llama.cpp;
`decilm_folder` and `layer_types_folder` for vLLM and SGLang, as a `llama_folder`.
"""
