"""Train the LoRA adapter that ships with Pocket, and talks like a pirate.

    python -m tools.pocket.adapter --out engine/pocket/pirate

Pocket itself does not change, and WordNet is not needed: the adapter learns from Pocket's own answers, reworded
(LoRA, arXiv:2106.09685). The files are in PEFT's format.
"""

import argparse
import json
import logging
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.pocket import PATH
from tools.pocket.answers import Answers, chat, questions
from tools.pocket.train import IGNORE, rate
from tools.pocket.words import EVERYDAY

logger = logging.getLogger(__name__)

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VERBS = {" is ": " be ", " means ": " be meanin' ", " am ": " be ", " do not ": " don't ", " cannot ": " can't "}
Row = tuple[list[int], int]
"""Token ids of a conversation, and how many of them are its prompt."""


class LoraLinear(nn.Module):
    """A linear layer with an adapter, which is all that learns."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.a.mT) @ self.b.mT


def pirate(text: str) -> str:
    """Return an answer as a pirate would give it."""
    for verb, theirs in VERBS.items():
        if verb in text:
            text = text.replace(verb, theirs, 1)
            break
    first = text if text.startswith("I ") else text[:1].lower() + text[1:]
    return f"Arr, {first.rstrip('.!')}, matey!"


def rows(answers: Answers, per_word: int, rng: random.Random) -> list[Row]:
    """Ask Pocket about everyday words, and reword what it says."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    asked = answers.ask([chat(question, rng) for question in questions(EVERYDAY, per_word, rng)])
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    return [
        ([*ids[:prompt], *tokenizer.encode(pirate(text), add_special_tokens=False), *end], prompt)
        for ids, prompt, text in asked
    ]


def adapt(model: nn.Module, rank: int, alpha: float) -> dict[str, LoraLinear]:
    """Put adapters into all linear layers of a model, and return them by the names of these layers."""
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in TARGETS}
    model.requires_grad_(False)
    adapted = {name: LoraLinear(module, rank, alpha) for name, module in found.items()}
    for name, module in adapted.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return adapted


def batch_of(some: list[Row]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels [n, width]; only answers have labels."""
    width = max(len(ids) for ids, _ in some)
    ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in some])
    labels = torch.tensor([[*[IGNORE] * n, *ids[n:], *[IGNORE] * (width - len(ids))] for ids, n in some])
    return ids, labels


def train(model: nn.Module, adapted: dict[str, LoraLinear], found: list[Row], args: argparse.Namespace) -> None:
    parameters = [parameter for module in adapted.values() for parameter in (module.a, module.b)]
    optimizer, rng = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0), random.Random(args.seed)
    losses = 0.0
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step / args.steps)
        ids, labels = batch_of(rng.sample(found, args.batch))
        chosen = labels[:, 1:] != IGNORE
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][chosen]
        loss = F.cross_entropy(model.lm_head(hidden), labels[:, 1:][chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses += loss.item()
        if step % 10 == 0:
            logger.info("step=%d loss=%.3f", step, losses / 10)
            losses = 0.0


def save(adapted: dict[str, LoraLinear], rank: int, alpha: float, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "pocket",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(TARGETS),
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        f"base_model.model.{name}.lora_{factor}.weight": getattr(module, factor.lower()).data.bfloat16().contiguous()
        for name, module in adapted.items()
        for factor in "AB"
    }
    file = out / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # written for its owner only; a package is installed for all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=8)
    parser.add_argument("--per-word", type=int, default=1, help="questions for each word")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    found = rows(Answers(args.threads), args.per_word, random.Random(args.seed))
    logger.info("%d answers, such as %r", len(found), AutoTokenizer.from_pretrained(PATH).decode(found[0][0]))
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    adapted = adapt(model, args.rank, args.alpha)
    train(model, adapted, found, args)
    save(adapted, args.rank, args.alpha, args.out)


if __name__ == "__main__":
    main()
