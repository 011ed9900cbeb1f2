"""Linear attention with a decaying state: Gated DeltaNet (arXiv:2412.06464, section 3.3), Kimi Delta Attention
(arXiv:2510.26692) and Mamba-2 (arXiv:2405.21060, section 6), which lacks the delta rule.

linear_attention(q, k, v, decay, beta, states, batch, scale, eps) -> [tokens, heads, d_v] of v's dtype, or float32
    q, k:  [tokens, k_heads, d_k]; head h of v reads head h // (heads / k_heads) of both
    v:     [tokens, heads, d_v]
    decay: logarithms, at most 0: [tokens, heads, 1] float32, or [tokens, heads, d_k] for one per channel of a key
    beta:  [tokens, heads] float32, the fraction by which the state's value for k moves to v; None: v is added to it
    scale: multiplies q
    eps:   q and k are divided by their lengths, sqrt(sum of squares + eps); None: they are not
    states: `state` [slots, heads, d_k, d_v], `keys` [slots, k_heads, CHUNK, d_k], `values` [slots, heads, CHUNK, d_v],
        `decays` [slots, heads, CHUNK, 1 or d_k], all float32

With the state S at the last border, the decays G summed up from there, and rows i, j from there:
    k_ij = k_j * exp(G_i - G_j)
    u_i = beta_i * (v_i - S^T (k_i * exp(G_i)) - sum over j < i of (k_i . k_ij) u_j)        or v_i without beta
    o_i = S^T (q_i * exp(G_i)) + sum over j <= i of (q_i . k_ij) u_j
and at the next border S becomes S * exp(G_last) + sum over j of k_last,j u_j^T. This is the chunkwise form. Its
triangular system is solved row by row, both in decode and in prompts. `linear_attention_plain` is the oracle.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import dispatch
from engine.model.ops.elementwise.norms import unit_q_and_k
from engine.model.state import CHUNK, States, state_rows


class LinearAttention(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States, batch: Batch,
        scale: float, eps: float | None, /,
    ) -> Tensor: ...  # fmt: skip


def select(key_dim: int, value_dim: int, decay_dim: int, device: torch.device) -> LinearAttention:
    """Return the fastest version."""
    if dispatch.cpu_kernels(torch.float32, device):
        from engine.model.ops.cpu.recurrent import channel_decays, linear_attention

        if linear_attention.supports(key_dim, value_dim):
            of_heads = decay_dim == 1
            (linear_attention.LINEAR_ATTENTION if of_heads else channel_decays.CHANNEL_DECAYS).compile(torch.float32)
            return linear_attention.linear_attention if of_heads else channel_decays.linear_attention
    if dispatch.gpu_kernels(torch.float32, device):
        from engine.model.ops.gpu.recurrent import linear_attention as gpu

        return gpu.linear_attention
    return linear_attention_plain


def linear_attention_plain(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States, batch: Batch, scale: float,
    eps: float | None,
) -> Tensor:  # fmt: skip
    """Compute row by row. q, k: [tokens, k_heads, d_k]; v: [tokens, heads, d_v]; decay: [tokens, heads, 1 or d_k];
    beta: [tokens, heads]."""
    q, k = unit_q_and_k(q, k, scale, eps)
    out, values = torch.zeros_like(v), v.float()
    q = q.repeat_interleave(v.shape[1] // k.shape[1], dim=1)
    for seq in state_rows(batch):
        own = {name: tensor[seq.slot] for name, tensor in states.items()}
        for row in range(seq.first, seq.last):
            position = seq.start + row - seq.first
            own["keys"][:, position % CHUNK] = k[row]
            share = None if beta is None else beta[row, :, None]
            out[row] = attend_row(q[row], values[row], decay[row], share, own, position).to(v.dtype)
            if (position + 1) % CHUNK == 0:
                move_state(own, position)
                if position + 1 == seq.save_at:
                    states["state"][seq.save_slot] = own["state"]
    return out


def attend_row(q: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, own: States, position: int) -> Tensor:
    """Return o [heads, d_v] of a row, and write the row's u and decay to `own`, which must already hold the row's
    key."""
    row = position % CHUNK
    own["decays"][:, row] = decay if row == 0 else own["decays"][:, row - 1] + decay
    past, keys = own["decays"][:, row].exp(), decayed_keys(own, row)
    state = own["state"] if position >= CHUNK else torch.zeros_like(own["state"])
    if beta is not None:
        k = keys[:, row]
        v = beta * (v - read(state, k * past) - read(own["values"][:, :row], inner(keys[:, :row], k)))
    own["values"][:, row] = v
    return read(state, q * past) + read(own["values"][:, : row + 1], inner(keys, q))


def move_state(own: States, position: int) -> None:
    """Decay the state over a full chunk, which ends at `position`, and add the chunk's rows."""
    added = decayed_keys(own, CHUNK - 1).transpose(1, 2).contiguous() @ own["values"].clone()
    if position >= CHUNK:
        added += own["state"] * own["decays"][:, -1].exp()[..., None]
    own["state"].copy_(added)


def decayed_keys(own: States, row: int) -> Tensor:
    """Return [heads, row + 1, d_k]: the keys of a chunk up to `row`, decayed as that row sees them."""
    keys, decays = own["keys"][:, : row + 1], own["decays"][:, : row + 1]
    group = len(decays) // len(keys)
    return keys.repeat_interleave(group, dim=0) * (decays[:, row, None] - decays).exp()


def read(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [heads, d_v] of rows [heads, n, d_v], with weights [heads, n]. Avoids matrix products,
    whose bits may depend on addresses."""
    return (rows * weights[..., None]).sum(1)


def inner(keys: Tensor, q: Tensor) -> Tensor:
    """Return the inner products of keys [heads, rows, d_k] with q [heads, d_k]: [heads, rows]."""
    return (keys * q[:, None]).sum(-1)
