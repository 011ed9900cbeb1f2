"""The causal depthwise convolution before a recurrent layer, over this rank's channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.ops.recurrent import causal_conv
from engine.model.shard import Shard, Sharded, Shards
from engine.model.state import States


class CausalConv(Sharded):
    """A causal depthwise convolution: [tokens, channels] -> the same.

    sections: this rank's slice of each section of the channels, in the checkpoint's order. The checkpoint keeps all
        sections in one tensor, or, if `apart`, each in a separate one.
    """

    def __init__(self, sections: dict[str, Shard], kernel: int, bias: bool, silu: bool = True, apart: bool = False):
        super().__init__()
        self.sections, self.kernel, self.silu = sections, kernel, silu
        self.names = [f"{name}.{{}}" if apart else f"{{}}:{name}" for name in sections]
        channels = sum(section.size for section in sections.values())
        self.weight = nn.Parameter(torch.empty(channels, kernel), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None
        self.conv = causal_conv.select(self.dtype, self.device)

    def forward(self, x: Tensor, states: States, batch: Batch) -> Tensor:
        return self.conv(x, self.weight, self.bias, states, batch, self.silu)

    def shards(self) -> Shards:
        shards: Shards = {}
        for parameter, shape in ((self.weight.data[:, None], (1, self.kernel)), (self.bias, ())):
            if parameter is not None:
                targets = parameter.data.split([section.size for section in self.sections.values()])
                for name, s, target in zip(self.names, self.sections.values(), targets, strict=True):
                    kind = "weight" if shape else "bias"
                    shards[name.format(kind)] = Shard((*s.shape, *shape), 0, s.start, s.size), target
        return shards
