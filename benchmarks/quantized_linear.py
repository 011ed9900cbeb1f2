"""Linear layers of one transformer layer, by what their weights are stored in: µs for all four products.

    python -m benchmarks.quantized_linear [--device cuda]

Weights of several layers are read in turn, so that no cache holds them, as in a model. On a CPU it is the time of one
thread, which other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.model.ops import linear, quantized_linear
from engine.model.quantization.weight import FP8, QuantizedWeight, quantize_rows

SHAPES = {"0.6B": (1024, 4096, 2048, 3072), "8B": (4096, 6144, 4096, 12288)}  # hidden, qkv, heads, intermediate
ROWS = (1, 4, 8, 16, 64, 256)
LAYERS = 4  # whose weights take turns


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--only", choices=KINDS, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.model}, bfloat16, {options.device}, torch {torch.__version__}")
    print("| weights | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("| --- " * (len(ROWS) + 1) + "|")
    with torch.inference_mode(), torch.device(options.device):
        for name in options.only or KINDS:
            quantize = KINDS[name]
            layers = [make_layer(SHAPES[options.model], quantize) for _ in range(LAYERS)]
            times = [measure(layers, rows, options.repetitions) for rows in ROWS]
            print(f"| {name} | " + " | ".join(f"{t:,.0f}" for t in times) + " |", flush=True)


Layer = list[tuple[int, Callable[..., Tensor]]]  # inputs, and the product with them


def make_layer(shape: tuple[int, ...], quantize: Callable[[Tensor], QuantizedWeight] | None) -> Layer:
    hidden, qkv, heads, intermediate = shape
    layer: Layer = []
    for outputs, inputs in ((qkv, hidden), (hidden, heads), (2 * intermediate, hidden), (hidden, intermediate)):
        weight = torch.randn(outputs, inputs)
        multiply = None if quantize is None else quantized_linear.select(quantize(weight), torch.bfloat16)
        if multiply is None:
            packed = linear.pack(weight.bfloat16())
            layer.append((inputs, partial(linear.linear, weight=packed)))
        else:
            layer.append((inputs, partial(without_bias, multiply)))
    return layer


def without_bias(multiply: quantized_linear.Multiply, x: Tensor) -> Tensor:
    return multiply(x, None)


def measure(layers: list[Layer], rows: int, repetitions: int) -> float:
    """µs per layer: the sum of the best times of its products, since other work on the machine only slows them.

    On a GPU the products of all layers are one CUDA graph, since a launch takes longer than most of them.
    """
    inputs = {size: torch.randn(rows, size, dtype=torch.bfloat16) for layer in layers for size, _ in layer}
    if inputs[layers[0][0][0]].is_cuda:
        from triton.testing import do_bench_cudagraph

        products = [partial(multiply, inputs[size]) for layer in layers for size, multiply in layer]
        return do_bench_cudagraph(lambda: [product() for product in products], return_mode="min") * 1e3 / len(layers)
    best = [float("inf")] * len(layers[0])
    for _ in range(repetitions):
        for layer in layers:
            for i, (size, multiply) in enumerate(layer):
                started = time.thread_time()
                multiply(inputs[size])
                best[i] = min(best[i], time.thread_time() - started)
    return sum(best) * 1e6


def integers(bits: int, group_size: int | None, activations: torch.dtype | None) -> Callable[[Tensor], QuantizedWeight]:
    def quantize(weight: Tensor) -> QuantizedWeight:
        values, scale = quantize_rows(weight, torch.int8, group_size)
        if bits == 4:
            values, scale = (values.float() / 16).round().clamp(-8, 7).to(torch.int8), scale * 16
        return QuantizedWeight(values, scale, None, bits, activations)

    return quantize


def fp8_rows(weight: Tensor) -> QuantizedWeight:
    return QuantizedWeight(*quantize_rows(weight, FP8), None, 8, FP8)


def fp8_blocks(weight: Tensor) -> QuantizedWeight:
    blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
    scale = blocks.repeat_interleave(128, 0)
    values = (weight.unflatten(1, (-1, 128)) / scale[..., None]).flatten(1).to(FP8)
    return QuantizedWeight(values, scale, None, 8, FP8)


KINDS: dict[str, Callable[[Tensor], QuantizedWeight] | None] = {
    "bfloat16": None,
    "int8 x int8": integers(8, None, torch.int8),
    "int8, groups of 32": integers(8, 32, None),
    "int4, groups of 128": integers(4, 128, None),
    "int4, groups of 32": integers(4, 32, None),
    "fp8 x fp8, per output": fp8_rows,
    "fp8 x fp8, 128 x 128": fp8_blocks,
}

if __name__ == "__main__":
    main()
