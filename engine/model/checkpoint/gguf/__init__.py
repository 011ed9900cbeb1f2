"""Reads GGUF files of llama.cpp as model folders: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
