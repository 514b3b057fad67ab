"""Models as files that other engines serve: GGUF for llama.cpp, DeciLM folders for vLLM and SGLang."""
