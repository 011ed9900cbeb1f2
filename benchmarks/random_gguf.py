"""Writes a Llama of 0.58 billion random weights as a GGUF file, for `python -m benchmarks.peers`: twenty layers of
width 1,536, and the vocabulary of another file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from benchmarks.command import run
from engine.model.checkpoint import smollm2

LAYERS, WIDTH, HEADS, KV_HEADS, INTERMEDIATE = 20, 1536, 12, 4, 4608
KV_WIDTH, CONTEXT = WIDTH // HEADS * KV_HEADS, 8192
SHAPES = {  # outputs and inputs
    "attn_q": (WIDTH, WIDTH), "attn_k": (KV_WIDTH, WIDTH), "attn_v": (KV_WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH), "ffn_gate": (INTERMEDIATE, WIDTH), "ffn_up": (INTERMEDIATE, WIDTH),
    "ffn_down": (WIDTH, INTERMEDIATE),
}  # fmt: skip
Q4_K_BYTES, Q4_K_NUMBERS = 144, 256
Type = Literal["Q4_0", "Q4_1", "Q4_K", "Q8_0"]


def blocks(rng: np.random.Generator, shape: tuple[int, int], type: str) -> np.ndarray:
    """Return a random matrix in blocks [outputs, bytes] uint8."""
    if type != "Q4_K":  # which `gguf` cannot write
        numbers = rng.standard_normal(shape, dtype=np.float32) * 0.02
        return gguf.quantize(numbers, GGMLQuantizationType[type])
    found = rng.integers(0, 256, (shape[0], shape[1] // Q4_K_NUMBERS, Q4_K_BYTES), dtype=np.uint8)
    scale = 0.02 / 32 / 4.6  # of scales of 0 to 63, and of values of 0 to 15, whose deviation is 4.6
    found[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    return found.reshape(shape[0], -1)


def main(
    file: Path,
    type: Annotated[Type, typer.Option(help="Of all matrices but the embedding, which has Q8_0.")] = "Q4_0",
    vocabulary: Annotated[Path | None, typer.Option(help="GGUF file with the tokens. Default: SmolLM2's.")] = None,
) -> None:
    """Write a model of random weights."""
    rng, writer, tokens = np.random.default_rng(0), GGUFWriter(file, "llama"), GGUFReader(vocabulary or smollm2.path())
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    for name, field in tokens.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    vocab_size = len(tokens.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(vocab_size)
    writer.add_tensor(
        "token_embd.weight", blocks(rng, (vocab_size, WIDTH), "Q8_0"), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            writer.add_tensor(
                f"blk.{layer}.{name}.weight", blocks(rng, shape, type), raw_dtype=GGMLQuantizationType[type]
            )
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    run(main)
