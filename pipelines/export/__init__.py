"""Models as files that other engines serve: GGUF for llama.cpp, folders for vLLM and SGLang."""
