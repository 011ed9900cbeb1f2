"""transformers' own model code over our paged attention, for architectures that engine/model/models/ lacks.

Imported for such a model only. transformers' modules compute what is special about a model; attention, linear layers,
norms, experts, embedding and head are replaced by ours, so that loading, tensor parallelism, quantization, prefix
caching and handoffs work as for native models.
"""
