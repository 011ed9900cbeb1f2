"""Attention of vision towers whose images have any size, in a few calls and without reading lengths from the device.

transformers' towers attend window by window, and first read on the host how long each window is. If the name of a
tower's attention contains "flash", the tower hands over the lengths of all windows instead. So an attention is
registered under such a name, and everything that depends on an image's size is computed on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import vision_utils
from transformers.modeling_utils import AttentionInterface

from engine.devices.device import copy_to

NAME = "manta_flash"


def attend_windows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, scaling: float, cu_seq_lens_q: Tensor, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend within each window: [1, heads, tokens, head_dim] each -> [1, tokens, heads, head_dim].

    cu_seq_lens_q: [windows + 1] int32 on the host, the first token of each window. Adjacent windows of equal length are
    computed by one call of torch.
    """
    lengths = np.diff(cu_seq_lens_q.numpy())
    runs = np.split(lengths, np.flatnonzero(np.diff(lengths)) + 1)
    parts, first = [], 0
    for run in runs:
        count, length = len(run), int(run[0])
        rows = slice(first, first + count * length)
        q, k, v = (x[0, :, rows].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # [windows, heads, length, head_dim]
        parts.append(attended.transpose(1, 2).flatten(0, 1))
        first = rows.stop
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register(NAME, attend_windows)


def grid_inputs(tower: Any, grid: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments that a tower of Qwen's family would otherwise derive from the sizes of images.

    grid: [images, 3] int64 on the host: time, height and width in patches. Lengths of windows stay on the host.
    """
    merge = tower.spatial_merge_size
    found: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grid, merge)}
    if hasattr(tower, "interpolation_mode"):
        found["interp_indices"], found["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    lengths = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grid)}
    if hasattr(tower, "window_size"):
        found["window_index"], lengths["cu_window_seqlens"] = windows(tower, grid)
    longest = {
        name.replace("cu_", "max_").replace("seqlens", "seqlen"): int(ends.diff().max())
        for name, ends in lengths.items()
    }
    there = {name: copy_to(x.numpy(), device) for name, x in found.items()}
    return {**there, **{name: torch.from_numpy(ends.numpy()) for name, ends in lengths.items()}, **longest}


def windows(tower: Any, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings of all images in the order of windows, and the borders of windows in patches. Images stay
    apart, since in some layers all tokens of an image attend to each other."""
    merge = tower.spatial_merge_size
    indices, borders, first, last = [], [torch.zeros(1, dtype=torch.int32)], 0, 0
    for image in grid.split(1):
        index, ends = vision_utils.get_vision_window_index(image, merge, tower.window_size, tower.patch_size)
        index, ends = by_length(index, ends, merge**2)
        indices.append(index + first)
        borders.append(ends[1:] + last)
        first, last = first + len(index), last + int(ends[-1])
    return torch.cat(indices), torch.cat(borders)


def by_length(index: Tensor, ends: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Put windows of an image of equal length next to each other. Windows at its edges are smaller than the others.

    index: [embeddings], the embeddings in the order of windows. ends: [windows + 1], the borders of windows, in
    patches. unit: patches of an embedding. Returns both in the new order.
    """
    lengths = ends.diff()
    order = lengths.argsort(descending=True, stable=True)
    windows = index.split((lengths // unit).tolist())
    return torch.cat([windows[i] for i in order.tolist()]), F.pad(lengths[order].cumsum(0, dtype=ends.dtype), (1, 0))
