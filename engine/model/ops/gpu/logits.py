"""Changes logits before sampling, in Triton: grammars' masks and penalties, one launch each for all rows. See
engine/model/ops/logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.ops.logits.penalties import Penalties

BLOCK = 4096  # tokens of the vocabulary that a program masks
SEGMENT = 2048  # tokens of the vocabulary whose occurrences a program counts
POSITIONS = 1024  # tokens of a sequence that it reads at a time


@triton.jit(do_not_specialize=["width"])
def mask_kernel(
    logits, rows, allowed, vocab, stride, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """Ban the tokens whose bit is 0. Grid (n, vocab / BLOCK)."""
    dependent_launch.begin(DEPENDENT)
    own, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(allowed + own * width + i // 8, mask=i < vocab, other=255).to(tl.int32)
    target = logits + tl.load(rows + own) * stride + i
    tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=(i < vocab) & ((bits >> i % 8) & 1 == 0))


def apply_masks(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    vocab = logits.shape[1]
    mask_kernel[len(rows), triton.cdiv(vocab, BLOCK)](
        logits, rows, allowed, vocab, logits.stride(0), allowed.stride(0), BLOCK=BLOCK,
        **dependent_launch.options(logits.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["history_stride", "where_stride", "where_pitch", "amount_stride", "amount_pitch"])
def penalise_kernel(
    logits, history, where, amounts, vocab, stride, history_stride, where_stride, where_pitch, amount_stride,
    amount_pitch, SEGMENT: tl.constexpr, POSITIONS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Count the tokens of a sequence that lie in a segment of the vocabulary, and change their logits. Grid (rows,
    vocab / SEGMENT)."""
    dependent_launch.begin(DEPENDENT)
    where += tl.program_id(0) * where_pitch
    amounts += tl.program_id(0) * amount_pitch
    row, slot, first = tl.load(where), tl.load(where + where_stride), tl.load(where + 2 * where_stride)
    output, count = tl.load(where + 3 * where_stride), tl.load(where + 4 * where_stride).to(tl.int32)
    begin = tl.program_id(1) * SEGMENT
    seen, said = tl.zeros([SEGMENT], tl.int32), tl.zeros([SEGMENT], tl.int32)
    for start in range(0, count, POSITIONS):
        n = start + tl.arange(0, POSITIONS)
        token = tl.load(history + slot * history_stride + first + n, mask=n < count, other=-1) - begin
        inside = (token >= 0) & (token < SEGMENT)
        token = tl.where(inside, token, 0)
        seen += tl.histogram(token, SEGMENT, mask=inside)
        said += tl.histogram(token, SEGMENT, mask=inside & (first + n >= output))
    i = begin + tl.arange(0, SEGMENT)
    changed = (i < vocab) & (seen > 0)
    target = logits + row * stride + i
    x = tl.load(target, mask=changed, other=0.0)
    repetition = tl.load(amounts)
    x = tl.where(x > 0.0, tl.div_rn(x, tl.zeros([SEGMENT], tl.float32) + repetition), x * repetition)
    spoken = tl.load(amounts + amount_stride) * said.to(tl.float32) + tl.load(amounts + 2 * amount_stride)
    tl.store(target, x - tl.where(said > 0, spoken, 0.0), mask=changed)


def penalise(logits: Tensor, penalties: Penalties, history: Tensor) -> None:
    where, amounts, vocab = penalties.where, penalties.amounts, logits.shape[1]
    penalise_kernel[where.shape[1], triton.cdiv(vocab, SEGMENT)](
        logits, history, where, amounts, vocab, logits.stride(0), history.stride(0), *where.stride(),
        *amounts.stride(), SEGMENT=SEGMENT, POSITIONS=POSITIONS, num_warps=8,
        **dependent_launch.options(logits.device),
    )  # fmt: skip
