"""The embedding and the LM head, split over the ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.model.layers.linear import packed, quantized
from engine.model.ops import argmax, linear
from engine.model.shard import OUTPUTS, Shard, Sharded, ShardPlan, Shards


class VocabParallel(Sharded):
    """This rank's rows of a [vocab_size, hidden_size] matrix.

    The vocabulary is padded, so that all ranks have the same number of rows, a multiple of `tp.vocab_multiple`. Padding
    stays uninitialised: no id points to it, and its logits are cut off.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: ShardPlan):
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows = rows = -(-vocab_size // (tp.size * tp.vocab_multiple)) * tp.vocab_multiple
        self.start = min(tp.rank * rows, vocab_size)
        self.stop = min(self.start + rows, vocab_size)
        self.weight = nn.Parameter(torch.empty(rows, hidden_size), requires_grad=False)

    def shards(self) -> Shards:
        rows = self.weight.data[: self.stop - self.start]
        return {"weight": (Shard((self.vocab_size, self.weight.shape[1]), OUTPUTS, self.start, len(rows)), rows)}


class VocabEmbedding(VocabParallel):
    """The embedding: [tokens] int64 -> [tokens, hidden]. A rank has zeros for ids that it does not hold."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return linear.rows_of(self.weight, ids)
        elsewhere = (ids < self.start) | (ids >= self.stop)
        rows = linear.rows_of(self.weight, (ids - self.start).masked_fill(elsewhere, 0))
        return self.tp.ranks.all_reduce(rows.masked_fill(elsewhere[:, None], 0))


class LMHead(VocabParallel):
    """The language model's head: [rows, hidden] -> logits [rows, vocab_size] float32, on every rank.

    format: the format to which `pack` quantizes the weight, if there is a kernel for it.
    """

    kernel: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def __init__(self, vocab_size: int, hidden_size: int, tp: ShardPlan, format: object | None = None):
        super().__init__(vocab_size, hidden_size, tp)
        self.format = format
        self.argmax = argmax.select(self.device)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.tp.ranks.all_gather(self.multiply(hidden))
        return logits[:, : self.vocab_size].contiguous()  # softmax would sum strided rows in another order

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit, [rows] float32, and its id, [rows] int64; among equal logits, the lowest id.
        Equals `forward(hidden).max(-1)`, but the ranks exchange two numbers per row instead of logits."""
        own = self.multiply(hidden)[:, : self.stop - self.start]
        if self.tp.size == 1:
            return self.argmax(own)
        if self.start == self.stop:  # a rank past the end of an odd vocabulary
            own = own.new_full((len(hidden), 1), -torch.inf)
        values, ids = self.argmax(own)
        pairs = torch.stack([values, (ids + self.start).float()], dim=-1)  # float32 has all integers up to 2^24
        values, ids = self.tp.ranks.all_gather(pairs).unflatten(-1, (-1, 2)).unbind(-1)
        values, rank = values.max(-1)  # among equals the first rank, which has the lowest ids
        return values, ids.gather(1, rank[:, None]).squeeze(1).long()

    def multiply(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's part of the vocabulary, [rows, hidden] -> [rows, rows of the weight], in
        float32 whatever the model's dtype."""
        if self.kernel is not None:
            return self.kernel(hidden.float(), None)
        return linear.logits(hidden, self.weight, self.rows)

    def pack(self) -> None:
        if self.format is not None:
            self.kernel = quantized().head_product(self.weight.data, self.format, self.dtype)
        if self.kernel is None:
            self.weight = packed(self.weight, linear.pack_head)
        else:
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class TiedLMHead(LMHead):
    """A head that shares the embedding's matrix and reads nothing from the checkpoint until `untie` gives it a
    matrix of its own."""

    def __init__(self, embedding: VocabEmbedding, format: object | None = None):
        Sharded.__init__(self)
        self.format = format
        self.argmax = argmax.select(self.device)
        self.tp, self.vocab_size = embedding.tp, embedding.vocab_size
        self.start, self.stop, self.rows = embedding.start, embedding.stop, embedding.rows
        self.weight = embedding.weight
        self.tied = True
        self.embedding = (embedding,)  # a tuple, so that the embedding is no submodule of the head

    def untie(self) -> None:
        self.weight = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)
        self.tied = False

    def pack(self) -> None:
        """Pack the weight. The embedding looks up rows in the packed weight if it can; otherwise it keeps a copy."""
        super().pack()
        if self.tied and linear.is_ours(self.weight):
            self.embedding[0].weight = self.weight

    def shards(self) -> Shards:
        return {} if self.tied else super().shards()
