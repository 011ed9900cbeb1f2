"""Trains Medusa heads on the hidden states of a model's own answers.

The model does not change, and the heads share its output layer (Medusa 1, arXiv:2401.10774).
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.pocket.train import IGNORE, rate

logger = logging.getLogger(__name__)


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

    The softmax is over the tokens that are a label in this batch, and the gradient is computed by hand in the dtype of
    `output`: ten times as fast as autograd over all tokens.
    """
    counted = (labels != IGNORE)[:, None]
    tokens, index = labels.clamp(min=0).unique(return_inverse=True)
    output, index = output[tokens], index[:, None]
    logits = x.detach().to(output.dtype) @ output.mT
    right = logits.argmax(-1, keepdim=True) == index
    share = logits.softmax(-1)
    own = share.gather(1, index)
    loss = -(own.float().clamp(min=1e-9).log() * counted).sum() / counted.sum()
    share.scatter_(1, index, own - 1)
    return loss.item(), ((share * counted) @ output).to(x.dtype) / counted.sum(), (right & counted).squeeze(1)


def train(heads: Heads, output: Tensor, states: Tensor, labels: Tensor, args: argparse.Namespace) -> None:
    """Learn for a time by the wall clock. Muon, with which Pocket's own matrices were trained, computes in bfloat16, so
    AdamW takes its place where a CPU has no such products."""
    parameters, options = heads.parameters(), {"lr": args.lr, "weight_decay": 0.0}
    if output.dtype == torch.bfloat16:
        optimizer: torch.optim.Optimizer = torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **options)
    else:
        optimizer = torch.optim.AdamW(parameters, **options)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train_heads`."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="residual layers of each head")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--states", type=Path, help="file that keeps the hidden states for another run")


def train_heads(output: Tensor, compute: Callable[[], tuple[Tensor, Tensor]], args: argparse.Namespace) -> None:
    """Train heads, and save them in `args.out`. output: the model's output layer, [vocab, hidden]. compute:
    returns what `hidden_states` does; called unless the file `args.states` has it."""
    if args.states and args.states.exists():
        states, labels = torch.load(args.states)
    else:
        states, labels = compute()
        if args.states:
            torch.save((states, labels), args.states)
    logger.info("%d hidden states", len(states))
    heads = Heads(states.shape[1], args.heads, args.layers)
    fastest = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    train(heads, output.to(fastest), states, labels, args)
    save(heads, len(output), args.out)
