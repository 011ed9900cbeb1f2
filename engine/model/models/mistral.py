"""Mistral, arXiv:2310.06825: Llama with a sliding attention window, which is a matter of configuration."""

from engine.model.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
