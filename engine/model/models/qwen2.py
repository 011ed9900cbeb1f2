"""Qwen 2 and 2.5, arXiv:2407.10671: Llama with biases on Q, K and V, which is a matter of configuration."""

from engine.model.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
