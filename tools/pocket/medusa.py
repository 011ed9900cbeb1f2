"""Train the Medusa heads that draft for Pocket, on its own answers: questions -> answers -> hidden states -> heads.

    python -m tools.pocket.medusa --out pocket_medusa --minutes 10

Pocket itself does not change, and WordNet is not needed: the words are those of words.py and, again and again, those
of the answers, as far as Pocket knows them. Heads share Pocket's output layer (Medusa 1, arXiv:2401.10774).
"""

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.pocket import PATH
from tools.pocket.dictionary import ANY_WORDINGS, KIND_WORDINGS, OPPOSITE_WORDINGS, WORDINGS, Entry, word_question
from tools.pocket.small_talk import COUNTRIES, OFF_TOPIC_WORDINGS, SMALL_TALK, SYSTEM_PROMPTS, UNKNOWN
from tools.pocket.train import IGNORE, rate
from tools.pocket.words import EVERYDAY

logger = logging.getLogger(__name__)

REFUSAL = UNKNOWN.partition("{")[0]
MAX_TOKENS = 80


class Answers:
    """Pocket's greedy answers, as rows of token ids with the length of the prompt."""

    def __init__(self, threads: int):
        self.llm = LLM("pocket", num_threads=threads, max_num_seqs=64, max_model_len=512)

    def ask(self, chats: list[list[dict[str, str]]]) -> list[tuple[list[int], int, str]]:
        """Token ids of each conversation, how many of them are its prompt, and the text of the answer."""
        outputs = self.llm.chat(chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), progress=False)
        rows = [(output, output.outputs[0]) for output in outputs]
        return [([*o.prompt_token_ids, *a.token_ids], len(o.prompt_token_ids), a.text) for o, a in rows]


def chat(question: str, rng: random.Random) -> list[dict[str, str]]:
    system = rng.choice(SYSTEM_PROMPTS.split("|")) if rng.random() < 0.2 else None
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": question}]


def known_words(answers: Answers) -> list[str]:
    """Return the words that Pocket explains, found in its explanations of others."""
    known: list[str] = []
    seen, asked = set(EVERYDAY), list(EVERYDAY)
    while asked:
        texts = [text for _, _, text in answers.ask([[{"role": "user", "content": f"Define {w}."}] for w in asked])]
        found = [(word, text) for word, text in zip(asked, texts, strict=True) if not text.startswith(REFUSAL)]
        known += [word for word, _ in found]
        near = {word for _, text in found for word in re.findall(r"\b[a-z]{3,}\b", text)}
        near |= {word[:-1] for word in near if word.endswith("s")}
        asked = sorted(near - seen)
        seen |= near
        logger.info("%d words are known, %d more are in their explanations", len(known), len(asked))
    return known


def questions(words: list[str], per_word: int, rng: random.Random) -> list[str]:
    """Wordings of everything that Pocket is asked, in about the shares in which it was trained on them."""
    found = []
    for word in words:
        entry = Entry(word, rng.choice("nnva"), "", countable=True)
        for i in range(per_word):
            found.append(word_question(entry, ANY_WORDINGS if i % 2 else WORDINGS[entry.pos], rng))
        if rng.random() < 0.3:
            found.append(word_question(entry, rng.choice([KIND_WORDINGS, OPPOSITE_WORDINGS]), rng))
        if rng.random() < 0.1:
            letters = word[:-1] + rng.choice("bcdfgklmnprtvaeiou")
            found.append(word_question(Entry(letters, "n", ""), ANY_WORDINGS, rng))
        if rng.random() < 0.1:
            wording, country = rng.choice(OFF_TOPIC_WORDINGS.split("|")), rng.choice(COUNTRIES.split("|"))
            found.append(wording.format(w=word, n=rng.randrange(100), m=rng.randrange(100), c=country))
    found += [question for some in SMALL_TALK.values() for question in some.split("|")] * 3
    rng.shuffle(found)
    return found


@torch.inference_mode()
def hidden_states(model: nn.Module, rows: list[tuple[list[int], int]], heads: int) -> tuple[Tensor, Tensor]:
    """Return the final hidden states [n, hidden] from which answers are sampled, and the tokens [n, heads] that head k
    is to predict there: the one after the next, and those that follow."""
    states, labels = [], []
    rows = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(rows), 32):
        batch = rows[start : start + 32]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in batch])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        for row, (tokens, prompt) in zip(hidden, batch, strict=True):
            states.append(row[prompt - 1 : len(tokens) - 2].bfloat16())
            padded = [*tokens, *[IGNORE] * heads]
            labels += [padded[i + 2 : i + 2 + heads] for i in range(prompt - 1, len(tokens) - 2)]
    return torch.cat(states), torch.tensor(labels)


class Heads(nn.Module):
    """hidden [n, hidden] -> what the model's output layer takes, [heads, n, hidden]."""

    def __init__(self, hidden: int, heads: int, layers: int):
        super().__init__()

        # at first every head is the model's own
        def make(layer: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(hidden, hidden) * (0.02 if layer else 0.0))

        self.heads = nn.ModuleList(nn.ParameterList(make(i) for i in range(layers)) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.residual(x, layers) for layers in self.heads])

    def residual(self, x: Tensor, layers: Iterable[Tensor]) -> Tensor:
        for weight in layers:
            x = x + F.silu(x @ weight.mT)
        return x


def loss_gradient(x: Tensor, output: Tensor, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the mean cross-entropy of logits x @ output.T, its gradient with respect to x [n, hidden], and which rows
    are right.

    The softmax is over the tokens that are a label in this batch, a fifth of all, and everything is in bfloat16 and by
    hand: ten times as fast as autograd over all of them.
    """
    counted = (labels != IGNORE)[:, None]
    tokens, index = labels.clamp(min=0).unique(return_inverse=True)
    output, index = output[tokens], index[:, None]
    logits = x.detach().bfloat16() @ output.mT
    right = logits.argmax(-1, keepdim=True) == index
    share = logits.softmax(-1)
    own = share.gather(1, index)
    loss = -(own.float().clamp(min=1e-9).log() * counted).sum() / counted.sum()
    share.scatter_(1, index, own - 1)
    return loss.item(), ((share * counted) @ output).to(x.dtype) / counted.sum(), (right & counted).squeeze(1)


def train(heads: Heads, output: Tensor, states: Tensor, labels: Tensor, args: argparse.Namespace) -> None:
    """Learn with Muon, as Pocket's own matrices did, for a time by the wall clock."""
    optimizer = torch.optim.Muon(heads.parameters(), lr=args.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    started, step, losses, hits = time.monotonic(), 0, 0.0, torch.zeros(labels.shape[1])
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress)
        chosen = torch.randint(len(states), (args.batch,))
        x = heads(states[chosen].float())
        loss, gradient, right = loss_gradient(x.flatten(0, 1), output, labels[chosen].T.flatten())
        x.backward(gradient.view_as(x))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, losses = step + 1, losses + loss
        hits += right.view(len(heads.heads), -1).float().mean(1)
        if step % 100 == 0:
            shares = " ".join(f"{hit:.3f}" for hit in (hits / 100).tolist())
            logger.info("%5.1f %% step=%d loss=%.3f right=%s", 100 * progress, step, losses / 100, shares)
            losses, hits = 0.0, torch.zeros(labels.shape[1])


def save(heads: Heads, vocab_size: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": len(heads.heads[0][0]),
        "vocab_size": vocab_size,
        "num_heads": len(heads.heads),
        "num_hidden_layers": len(heads.heads[0]),
        "original_lm_head": True,
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        f"blocks.{i}.layers.{j}.weight": weight.data.bfloat16()
        for i, layers in enumerate(heads.heads)
        for j, weight in enumerate(layers)
    }
    save_file(tensors, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)  # written for its owner only; a package is installed for all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="residual layers of each head")
    parser.add_argument("--per-word", type=int, default=4, help="questions for each word")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--states", type=Path, help="file that keeps the hidden states for another run")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    if args.states and args.states.exists():
        states, labels = torch.load(args.states)
    else:
        answers = Answers(args.threads)
        asked = questions(known_words(answers), args.per_word, rng)
        rows = [(ids, prompt) for ids, prompt, _ in answers.ask([chat(question, rng) for question in asked])]
        logger.info("%d answers, %d tokens", len(rows), sum(len(ids) - prompt for ids, prompt in rows))
        states, labels = hidden_states(model, rows, args.heads)
        if args.states:
            torch.save((states, labels), args.states)
    logger.info("%d hidden states", len(states))
    output = model.lm_head.weight.detach().bfloat16()
    heads = Heads(states.shape[1], args.heads, args.layers)
    train(heads, output, states, labels, args)
    save(heads, len(output), args.out)


if __name__ == "__main__":
    main()
