"""Random weights in place of those of a checkpoint (`load_format: dummy`)."""

from __future__ import annotations

import zlib

import torch

from engine.model.loader import Loadable, checkpoint_shards


def fill_with_noise(model: Loadable) -> None:
    """Fill the model with random weights, for measurements. A tensor that every rank holds is the same on all ranks."""
    named = [(name, target) for name, parts in checkpoint_shards(model).items() for _, target in parts]
    for name, target in named:
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
        if not target.dtype.is_floating_point:  # values of a quantized weight, or the group of each column
            if name.endswith("_scales"):  # exponents of MXFP4: 2 ** -7
                target.fill_(120)
            elif target.dim() == 1:
                target.zero_()
            else:
                target.random_(generator=generator)
            continue
        noise = torch.randn(target.shape, generator=generator, dtype=torch.float32, device=target.device)
        # like an untrained model: small weights and norms near 1, so that hidden states neither vanish nor overflow
        target.copy_(noise.mul_(0.02).add_(1.0) if target.dim() == 1 else noise.mul_(0.02))
