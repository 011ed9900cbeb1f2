"""A tiny model of each kind, with random weights, and the drafters and adapters that go with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.lora.adapter_files import open_adapter
from engine.wire.parts.adapter import ModelAdapter
from tests import models, pooling_models
from tests.engine.spec_decode.draft_checkpoints import (
    DRAFT_VOCAB,
    VOCAB,
    PlainEagle3,
    write_authors,
    write_mtp,
)
from tests.pooling_models import EMBEDDINGS
from tests.transformers_models import make_transformers_model
from tests.vision_models import make_vision_model

ADAPTED = ("q_proj", "o_proj", "down_proj", "out_proj", "query")  # layers that split outputs over ranks, and inputs


@dataclass(frozen=True)
class Kind:
    """What decides the family of a model."""

    attention: str = "full"
    images: bool = False
    experts: bool = False
    code: str = "native"
    """Whose code computes it: ours, or that of `transformers`."""
    bidirectional: bool = False
    """Whether a token sees later ones too. Such a model only embeds."""
    wide: bool = False
    """Whether two ranks can each divide their inputs into groups of 32, as int4 does."""


FAMILIES = {
    Kind(): "llama",
    Kind("windows"): "gemma3",
    Kind("recurrent"): "qwen3_5",
    Kind("latent"): "deepseek_v3",
    Kind("latent", experts=True): "deepseek_v3",
    Kind(experts=True): "glm4_moe",
    Kind("windows", experts=True): "gpt_oss",
    Kind("recurrent", experts=True): "qwen3_next",
}
WITH_IMAGES = {
    Kind(images=True): "qwen3_vl",
    Kind("windows", images=True): "gemma3",
    Kind("recurrent", images=True): "qwen3_5",
    Kind(images=True, experts=True): "qwen3_vl_moe",
    Kind("windows", images=True, experts=True): "gemma4_moe",
    Kind("recurrent", images=True, experts=True): "qwen3_5_moe",
}
BY_TRANSFORMERS = {
    Kind(code="transformers"): "SmolLM3ForCausalLM",
    Kind("windows", code="transformers"): "Olmo3ForCausalLM",
    Kind(experts=True, code="transformers"): "HunYuanMoEV1ForCausalLM",
}
BIDIRECTIONAL = {
    Kind(bidirectional=True): "distilroberta",
    Kind("windows", bidirectional=True): "embedding_gemma",
}
KINDS = {**FAMILIES, **WITH_IMAGES, **BY_TRANSFORMERS, **BIDIRECTIONAL}
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
}
"""Fields of a wide model, where its family has them."""
WITH_MTP = ("deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_next")


class Models:
    """Writes each folder when it is first asked for."""

    def __init__(self, root: Path):
        self._root = root

    def folder(self, kind: Kind) -> Path:
        """The model of a kind, with a tokenizer, and with a head for drafts where its family has one (MTP)."""
        family = self.family(kind)
        name = f"{family}{' with images' * kind.images}{' wide' * kind.wide}"
        return self._made(name, lambda folder: write_model(folder, family, kind))

    def family(self, kind: Kind) -> str:
        return KINDS[replace(kind, wide=False)]

    def small(self, kind: Kind) -> Path:
        """A draft model for the model of a kind. So are the heads below."""
        return self._made_for(
            kind,
            "small",
            lambda folder, sizes: models.make_model(folder, "qwen3", vocab_size=VOCAB, num_hidden_layers=1, **sizes),
        )

    def eagle3(self, kind: Kind) -> Path:
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        return self._made_for(
            kind,
            "eagle3",
            lambda folder, sizes: write_authors(folder, PlainEagle3(False, DRAFT_VOCAB, **sizes), **layers, **sizes),
        )

    def adapters(self, kind: Kind) -> list[ModelAdapter]:
        """Two adapters of the model of a kind."""
        model = self.folder(kind)
        folders = [self._root / f"{model.name} {name}" for name in ("one", "two")]
        for seed, folder in enumerate(folders):
            if not folder.exists():
                write_adapter(folder, model, seed)
        return [ModelAdapter(folder.name, str(folder), open_adapter(folder).digest) for folder in folders]

    def _made_for(self, kind: Kind, name: str, write: Callable[[Path, dict[str, int]], object]) -> Path:
        """The same for a drafter, as wide as the model of a kind."""
        sizes = {key: WIDE[key] for key in ("hidden_size", "intermediate_size") if kind.wide}
        return self._made(f"{name}{' wide' * kind.wide}", lambda folder: write(folder, sizes))

    def _made(self, name: str, write: Callable[[Path], object]) -> Path:
        folder = self._root / name
        if not folder.exists():
            folder.mkdir()
            write(folder)
        return folder


def write_model(folder: Path, family: str, kind: Kind) -> None:
    sizes = WIDE if kind.wide else {}
    if kind.bidirectional:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 130}
        fields = {**EMBEDDINGS[family].fields, **known(WIDE, EMBEDDINGS[family].fields), **heads}
        pooling_models.make(folder, replace(EMBEDDINGS[family], fields=fields, pooling=None))
        return
    if kind.images or kind.code == "transformers":
        models.make_tokenizer().save_pretrained(folder)
        make = make_vision_model if kind.images else make_transformers_model
        make(folder, family, vocab_size=VOCAB, **sizes)
        return
    sizes = known(sizes, models.COMMON | (models.FAMILIES | models.HYBRIDS)[family][1])
    models.make_model(folder, family, tokenizer=True, vocab_size=VOCAB, **sizes)
    if family in WITH_MTP:
        write_mtp(folder)


def known(sizes: dict[str, int], fields: dict[str, Any]) -> dict[str, int]:
    """Return those of the sizes that a model has. fields: of its configuration."""
    return {key: size for key, size in sizes.items() if key in fields}


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> None:
    """Write an adapter of a model's linear layers, such that every token feels it."""
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((model / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]  # the next one predicts further tokens (MTP)
    factors = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".weight")
            number = re.search(r"^(?:model\.(?:language_model\.)?layers|encoder\.layer)\.(\d+)\.", module)
            if not module.endswith(ADAPTED) or number is None or int(number[1]) >= layers:
                continue
            shape = file.get_slice(name).get_shape()
            if len(shape) == 2 and ".experts." not in module:
                for factor, sizes in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                    noise = torch.randn(sizes, generator=generator) * 0.5 / sizes[1] ** 0.5
                    factors[f"base_model.model.{module}.lora_{factor}.weight"] = noise
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(ADAPTED)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
