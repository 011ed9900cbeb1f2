"""A tiny model of each kind, with random weights, and the drafters and adapters that go with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.lora.adapter_files import open_adapter
from engine.wire.parts.adapter import ModelAdapter
from tests.engine.spec_decode.draft_checkpoints import (
    DRAFT_VOCAB,
    VOCAB,
    PlainEagle3,
    write_authors,
    write_heads,
    write_mtp,
)
from tests.models import make_model, make_tokenizer
from tests.vision_models import make_vision_model

ADAPTED = ("q_proj", "o_proj", "down_proj", "out_proj")  # layers that split outputs over ranks, and inputs


@dataclass(frozen=True)
class Kind:
    """What decides the family of a model."""

    attention: str = "full"
    images: bool = False
    experts: bool = False


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
WITH_MTP = ("deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_next")


class Models:
    """Writes each folder when it is first asked for."""

    def __init__(self, root: Path):
        self._root = root

    def folder(self, kind: Kind) -> Path:
        """The model of a kind, with a tokenizer, and with a head for drafts where its family has one (MTP)."""
        if kind in WITH_IMAGES:
            return self._made(f"{WITH_IMAGES[kind]} with images", lambda folder: write_vision_model(folder, kind))
        return self._made(FAMILIES[kind], write_model)

    def vision_family(self, kind: Kind) -> str:
        return WITH_IMAGES[kind]

    @cached_property
    def small(self) -> Path:
        return self._made("small", lambda folder: make_model(folder, "qwen3", vocab_size=VOCAB, num_hidden_layers=1))

    @cached_property
    def eagle3(self) -> Path:
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        return self._made("eagle3", lambda folder: write_authors(folder, PlainEagle3(False, DRAFT_VOCAB), **layers))

    @cached_property
    def medusa(self) -> Path:
        return self._made("medusa", lambda folder: write_heads(folder, "authors"))

    def adapters(self, kind: Kind) -> list[ModelAdapter]:
        """Two adapters of the model of a kind."""
        model = self.folder(kind)
        folders = [self._root / f"{model.name} {name}" for name in ("one", "two")]
        for seed, folder in enumerate(folders):
            if not folder.exists():
                write_adapter(folder, model, seed)
        return [ModelAdapter(folder.name, str(folder), open_adapter(folder).digest) for folder in folders]

    def _made(self, name: str, write: Callable[[Path], object]) -> Path:
        folder = self._root / name
        if not folder.exists():
            folder.mkdir()
            write(folder)
        return folder


def write_model(folder: Path) -> None:
    make_model(folder, folder.name, tokenizer=True, vocab_size=VOCAB)
    if folder.name in WITH_MTP:
        write_mtp(folder)


def write_vision_model(folder: Path, kind: Kind) -> None:
    make_tokenizer().save_pretrained(folder)
    make_vision_model(folder, WITH_IMAGES[kind], vocab_size=VOCAB)


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> None:
    """Write an adapter of a model's linear layers, such that every token feels it."""
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((model / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]  # the next one predicts further tokens (MTP)
    factors = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".weight")
            number = re.search(r"^model\.(?:language_model\.)?layers\.(\d+)\.", module)
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
