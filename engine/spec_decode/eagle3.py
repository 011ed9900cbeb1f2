"""EAGLE-3, arXiv:2503.01840: one decoder layer on the hidden states of three of the target's layers.

Reads checkpoints of the authors, SpecForge, AngelSlim, Model Optimizer and vLLM's speculators.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.checkpoint.fields import Fields, reading
from engine.model.checkpoint.folder import read_json
from engine.model.config import ModelConfig
from engine.model.layers.embedding import LMHead, VocabEmbedding
from engine.model.layers.linear import QKVLinear, ReplicatedLinear
from engine.model.layers.norm import RMSNorm
from engine.model.loader import tensors_by_file
from engine.model.models.llama import PACKED, LlamaAttention, LlamaLayer
from engine.model.models.registry import build
from engine.model.shard import Sharded, ShardPlan, Shards, replicated
from engine.model.tensor_names import NativeNames
from engine.spec_decode.drafter import DraftInputs
from engine.spec_decode.head_drafter import HeadDrafter
from engine.spec_decode.target import Target, Vocabulary, check_fits

# Fields that change the computation, and the values that are supported; the last five are of Model Optimizer's
# `eagle_config`.
NEEDED: dict[str, tuple[Any, ...]] = {
    "norm_before_fc": (None, False),
    "parallel_drafting": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
    "parallel_draft_step": (None, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    layers: ModelConfig
    """Shape of the decoder layers."""
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs the head reads; vLLM's `eagle_aux_hidden_state_layer_ids`."""

    @classmethod
    def from_folder(cls, folder: Path, target: Target) -> Eagle3Config:
        """Read a head's configuration. Raises ConfigError or ModelFolderError if the head does not fit the target."""
        raw = _read(folder)
        nested = raw.get("eagle_config") or {}
        for key, values in NEEDED.items():
            if (value := raw.get(key, nested.get(key))) not in values:
                limit = f"an EAGLE-3 head with {key} {json.dumps(values[-1])} instead of {json.dumps(value)}"
                raise ConfigError("speculative_config.model", str(folder), limit)
        raw["architectures"] = ["LlamaForCausalLM"]
        # allow positions beyond those of its training, to the end of the target's last block
        raw["max_position_embeddings"] = target.config.max_position_embeddings + target.block_size
        layers, count = replace(ModelConfig.from_fields(raw, folder), keeps_all_kv=True), target.config.num_layers
        aux = read_aux_layers(folder, count)
        with reading(folder, "config.json"):
            found = cls(
                layers=layers,
                target_hidden_size=raw.get("target_hidden_size") or layers.hidden_size,
                draft_vocab_size=raw.get("draft_vocab_size") or layers.vocab_size,
                norm_before_residual=bool(raw.get("norm_before_residual")),
                aux_layers=aux,
            )
        check_fits(folder, layers.vocab_size, target.config, found.target_hidden_size)
        return found


def _read(folder: Path) -> Fields:
    raw = Fields(read_json(folder, "config.json"))
    with reading(folder, "config.json"):
        return Fields({**raw, **(raw.get("transformer_layer_config") or {}), "eagle_config": raw.get("eagle_config")})


def read_aux_layers(folder: Path, count: int) -> tuple[int, ...]:
    """Return the layers of a target with `count` layers whose inputs a head reads. Raises ConfigError."""
    raw, key = _read(folder), "eagle_aux_hidden_state_layer_ids"
    with reading(folder, "config.json"):
        # within `eagle_config` the ids mean layers whose outputs are read, as in SGLang
        after = [number + 1 for number in (raw.get("eagle_config") or {}).get(key) or ()]
        aux = tuple(raw.get(key) or after or (2, count // 2, count - 3))
    if aux != tuple(sorted(set(aux) & set(range(count)))):
        limit = f"made for a target of {count} layers, and must name three of them in rising order"
        raise ConfigError("speculative_config.model", f"{folder} (layers {aux})", limit)
    return aux


class Eagle3Attention(LlamaAttention):
    """Attention over embeddings and hidden states side by side: [tokens, 2 * hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.qkv_proj = QKVLinear(replace(cfg, hidden_size=2 * cfg.hidden_size), tp, f"layers.{layer}.self_attn")


class Eagle3Layer(LlamaLayer):
    """The first layer: (embeddings, hidden states), each [tokens, hidden] -> (x, residual), as in LlamaLayer."""

    attention_type = Eagle3Attention

    def __init__(self, cfg: Eagle3Config, tp: ShardPlan):
        super().__init__(cfg.layers, tp, 0)
        self.norm_before_residual = cfg.norm_before_residual
        self.hidden_norm = RMSNorm(cfg.layers.hidden_size, cfg.layers.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        normed = self.hidden_norm(residual)
        attended = self.self_attn(torch.cat((self.input_layernorm(x), normed), dim=-1), batch)
        residual, x = self.post_attention_layernorm.add(normed if self.norm_before_residual else residual, attended)
        return self.mlp(x), residual


class DraftVocabulary(Sharded):
    """The target's tokens that the head can guess. An offset for each of the head's ids gives the target's id."""

    def __init__(self, size: int):
        super().__init__()
        self.offset = nn.Parameter(torch.empty(size, dtype=torch.int64), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ids + self.offset[ids]

    def shards(self) -> Shards:
        return {"": replicated(self.offset)}


class Eagle3Head(NativeNames, nn.Module):
    packed: ClassVar[dict[str, str]] = PACKED
    unused: tuple[str, ...] = ()

    def __init__(self, cfg: Eagle3Config, stored: set[str]):
        """stored: names of the checkpoint's tensors. An embedding or an output layer may be missing."""
        super().__init__()
        layers, single = cfg.layers, ShardPlan()
        size, vocab_size = layers.hidden_size, layers.vocab_size
        names = {self.canonical_name(name) for name in stored}
        self.fc = ReplicatedLinear(len(cfg.aux_layers) * cfg.target_hidden_size, size, bias=False)
        rest = (LlamaLayer(layers, single, i) for i in range(1, layers.num_layers))
        self.layers = nn.ModuleList([Eagle3Layer(cfg, single), *rest])
        self.norm = RMSNorm(size, layers.rms_norm_eps)
        self.embed_tokens = VocabEmbedding(vocab_size, size, single) if "embed_tokens.weight" in names else None
        self.lm_head = LMHead(cfg.draft_vocab_size, size, single) if "lm_head.weight" in names else None
        self.d2t = DraftVocabulary(cfg.draft_vocab_size) if cfg.draft_vocab_size != vocab_size else None

    def share(self, vocabulary: Vocabulary) -> None:
        """Use the target's embedding and output layer if the checkpoint has none."""
        self.embed_tokens = self.embed_tokens or vocabulary.embed_tokens
        self.lm_head = self.lm_head or vocabulary.lm_head

    def target_states(self, step: DraftInputs) -> Tensor:
        assert step.aux_hidden is not None
        return self.fc(step.aux_hidden)

    def forward(self, input_ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.embed_tokens is not None
        x, residual = self.embed_tokens(input_ids), hidden
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        hidden, normed = self.norm.add(residual, x)
        return normed, hidden

    def best(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None
        ids = self.lm_head.best(hidden)[1]
        return ids if self.d2t is None else self.d2t(ids)

    def checkpoint_name(self, path: str) -> str:
        return super().checkpoint_name(path).removeprefix("model.").removesuffix(".")

    def canonical_name(self, name: str) -> str | None:
        """Return our name of a tensor; None for `t2d`, which repeats `d2t`. The authors call the layer `midlayer`."""
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        return None if name == "t2d" else name


def eagle3_drafter(folder: Path, target: Target) -> HeadDrafter:
    cfg = Eagle3Config.from_folder(folder, target)
    if target.config.transformers or target.config.bidirectional:
        why = "which transformers' own code computes" if target.config.transformers else "which does not generate"
        limit = f"a method other than eagle3 for {target.config.architecture}, {why}"
        raise ConfigError("speculative_config.method", "eagle3", limit)
    stored = {"lm_head.weight"} if target.dummy else {n for names in tensors_by_file(folder).values() for n in names}
    head = build(lambda: Eagle3Head(cfg, stored), target.dtype, target.device)
    target.load(head, folder)
    if head.embed_tokens is None or head.lm_head is None:
        head.share(target.vocabulary())
    return HeadDrafter(head, cfg.layers, target, cfg.aux_layers)
