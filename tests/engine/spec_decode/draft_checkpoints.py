"""Small random checkpoints of drafters in the published formats, beside plain versions of what they compute."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.models import make_model, randomise

HIDDEN, VOCAB, DRAFT_VOCAB = 48, 375, 31  # the vocabulary of the tokenizer of tests/models.py
NUM_DRAFTS = 3  # drafted tokens
MTP_LAYER = 3
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,  # less than the target's
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


class PlainEagle3(torch.nn.Module):
    """The authors' head in transformers' layers, whose projections take embeddings and hidden states."""

    def __init__(self, norm_before_residual: bool, draft_vocab: int, seed: int = 0, **sizes: int):
        """sizes: other values of LAYER."""
        super().__init__()
        self.config = LlamaConfig(**{**LAYER, "max_position_embeddings": 512, **sizes}, attn_implementation="eager")
        hidden = self.config.hidden_size
        self.midlayer = LlamaDecoderLayer(self.config, 0)
        for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
            setattr(self.midlayer.self_attn, name, torch.nn.Linear(2 * hidden, heads * 16, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, 1e-5)
        self.embed_tokens = torch.nn.Embedding(VOCAB, hidden)
        self.fc = torch.nn.Linear(3 * hidden, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, 1e-5)
        self.lm_head = torch.nn.Linear(hidden, draft_vocab, bias=False)
        self.norm_before_residual = norm_before_residual
        randomise(self, tied=False, seed=seed)
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        self.target_ids = ids if draft_vocab < VOCAB else torch.arange(VOCAB)

    def layer(self, ids, states):
        """The head's states after all pairs, before the norm."""
        length, layer = len(ids), self.midlayer
        positions = torch.arange(length)[None]
        rope = LlamaRotaryEmbedding(self.config)(states, positions)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        normed = layer.hidden_norm(states)
        both = torch.cat((layer.input_layernorm(self.embed_tokens(ids)), normed), -1)
        attended = layer.self_attn(both[None], position_embeddings=rope, attention_mask=mask)[0][0]
        x = (normed if self.norm_before_residual else states) + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))

    @torch.inference_mode()
    def drafts(self, tokens: list[int], aux, count: int) -> list[int]:
        """tokens: one more than the rows of `aux`, the newest of them last."""
        ids, states, found = tokens[1:], self.fc(aux[: len(tokens) - 1]), []
        for _ in range(count):
            out = self.layer(torch.tensor(ids), states)[-1:]
            found.append(int(self.target_ids[self.lm_head(self.norm(out)).argmax()]))
            ids, states = [*ids, found[-1]], torch.cat((states, out))
        return found


def write_authors(folder, head: PlainEagle3, **changes):
    """The authors' format, and SpecForge's: no embedding, ids of the target by their distance."""
    tensors = {name: t.contiguous() for name, t in head.state_dict().items() if name != "embed_tokens.weight"}
    tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")
    config = {
        **LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def write_speculators(folder, head: PlainEagle3):
    """vLLM's speculators: another name of the layer, its fields in an object of their own, an embedding."""
    tensors = {name.replace("midlayer.", "layers.0."): t.contiguous() for name, t in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LAYER, "model_type": "llama"},
        "draft_vocab_size": VOCAB,
        "norm_before_residual": head.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 5],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MTP_FAMILIES = {  # layer, rotary embedding, norm, and a layer of the model of the same kind
    "deepseek_v3": (DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding, Glm4MoeRMSNorm, MTP_LAYER),
    "glm4_moe": (Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding, Glm4MoeRMSNorm, MTP_LAYER),
    "qwen3_next": (
        qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRotaryEmbedding, qwen3_next.Qwen3NextRMSNorm, 2
    ),
    "qwen3_5_text": (qwen3_5.Qwen3_5DecoderLayer, qwen3_5.Qwen3_5TextRotaryEmbedding, qwen3_5.Qwen3_5RMSNorm, 2),
}  # fmt: skip


class PlainMTP(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        layer, rotary, norm, number = MTP_FAMILIES[self.config.model_type]
        self.qwen = self.config.model_type.startswith("qwen")
        self.block, self.rotary = layer(self.config, number), rotary(self.config)
        size = self.config.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(size, self.config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        randomise(self, tied=False, seed=3)
        self.embed, self.head = target.model.embed_tokens, target.lm_head

    @torch.inference_mode()
    def drafts(self, tokens: list[int], hidden, count: int) -> list[int]:
        ids, states, found = tokens[1:], hidden[: len(tokens) - 1], []
        for _ in range(count):
            length = len(ids)
            x = self.eh_proj(torch.cat((self.enorm(self.embed(torch.tensor(ids))), self.hnorm(states)), -1))
            rope = self.rotary(x, torch.arange(length)[None])
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            out = self.block(x[None], position_embeddings=rope, attention_mask=mask)[0][-1:]
            normed = self.norm(out)
            found.append(int(self.head(normed).argmax()))
            ids, states = [*ids, found[-1]], torch.cat((states, normed if self.qwen else out))
        return found


def write_mtp(folder: Path) -> PlainMTP:
    """Add a layer to a model in GLM 4.5's format, numbered after the others, with copies of embedding and head, or in
    Qwen's."""
    head = PlainMTP(folder)
    tensors, prefix = load_file(folder / "model.safetensors"), f"model.layers.{MTP_LAYER}."
    if head.qwen:
        prefix = "mtp.layers.0."
        own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
        tensors |= {f"mtp.{name}.weight": getattr(head, part).weight.data for part, name in own.items()}
    for name, tensor in head.state_dict().items():
        if name.startswith("block."):
            block = name.removeprefix("block.")
            if "mlp.experts." in block:  # transformers stacks them
                parts = (
                    {"down_proj": tensor}
                    if "down" in block
                    else dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
                )
                for part, stacked in parts.items():
                    for i, expert in enumerate(stacked):
                        tensors[f"{prefix}mlp.experts.{i}.{part}.weight"] = expert.contiguous()
            else:
                tensors[prefix + block] = tensor.contiguous()
        elif not head.qwen and name.startswith(("enorm", "hnorm", "eh_proj")):
            tensors[prefix + name] = tensor
    if not head.qwen:
        tensors[f"{prefix}shared_head.norm.weight"] = head.norm.weight.data
        tensors[f"{prefix}shared_head.head.weight"] = head.head.weight.data.clone()
        tensors[f"{prefix}embed_tokens.weight"] = head.embed.weight.data.clone()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"mtp_num_hidden_layers" if head.qwen else "num_nextn_predict_layers": 1})
    )
    return head


def copy_with_noise(folder: Path, copy: Path) -> Path:
    """Write a model that mostly says what this one says."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * p.std() * torch.randn(p.shape, generator=generator))
    model.save_pretrained(copy)
    return copy


DRAFTERS = ("ngram", "suffix", "draft_model", "same_model", "noisy_model", "eagle3", "mtp",
            "hybrid_ngram", "hybrid_model", "hybrid_mtp")  # fmt: skip


def make_drafters(root: Path) -> dict[str, tuple[Path, dict[str, str]]]:
    """Write a target for each drafter, and the drafter; return the target's folder, and the options."""

    def new(name: str) -> Path:
        (root / name).mkdir()
        return root / name

    llama = make_model(new("llama"), "llama", tokenizer=True, vocab_size=VOCAB, num_hidden_layers=8)
    glm = make_model(new("glm"), "glm4_moe", tokenizer=True, vocab_size=VOCAB)
    hybrid = make_model(new("hybrid"), "qwen3_5", tokenizer=True, vocab_size=VOCAB)
    write_mtp(hybrid)
    small, eagle3 = make_model(new("qwen3"), "qwen3", vocab_size=VOCAB), new("eagle3")
    write_mtp(glm)
    write_authors(eagle3, PlainEagle3(False, DRAFT_VOCAB))
    return {
        "ngram": (llama, {"method": "ngram"}),
        "suffix": (llama, {"method": "suffix"}),
        "draft_model": (llama, {"method": "draft_model", "model": str(small)}),
        "same_model": (llama, {"method": "draft_model", "model": str(llama)}),
        "noisy_model": (llama, {"method": "draft_model", "model": str(copy_with_noise(llama, new("noisy")))}),
        "eagle3": (llama, {"method": "eagle3", "model": str(eagle3)}),
        "mtp": (glm, {"method": "mtp"}),
        "hybrid_ngram": (hybrid, {"method": "ngram", "prompt_lookup_min": 1}),
        "hybrid_model": (hybrid, {"method": "draft_model", "model": str(small)}),
        "hybrid_mtp": (hybrid, {"method": "mtp"}),
    }
