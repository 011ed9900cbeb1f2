"""GGUF files of llama.cpp, read as model folders: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
