"""Says what `make test-gpu` finds on this machine, and what is missing: `python -m tests.gpu.requirements`."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata

NEEDED = {
    "torch": "computes",
    "numpy": "computes",
    "msgspec": "plans and messages",
    "safetensors": "weights",
    "transformers": "tiny models to test with, chat templates",
    "tokenizers": "tokenizers",
    "jinja2": "chat templates",
    "rich": "progress bars",
    "pytest": "runs the tests",
    "hypothesis": "batches for the kernels' tests",
}
USEFUL = {
    "triton": "our kernels; without it plain torch runs, many times slower, and without CUDA graphs",
    "xdist": "tests in several processes (package pytest-xdist)",
    "zmq": "several ranks, and KV transfer between engines (package pyzmq)",
    "xxhash": "KV transfer over TCP",
    "numba": "fast kernels on the CPU, where the reference is computed",
    "nixl": "KV transfer over NIXL",
    "flashinfer": "FlashInfer, which attends in decode steps on Hopper and Blackwell",
    "flash_attn_interface": "FlashAttention 3, an attention backend beside ours on Hopper",
    "flash_attn": "FlashAttention 2 on Ampere and Ada, or 4 on Hopper and Blackwell",
    "llguidance": "structured outputs",
}


def missing(modules: dict[str, str]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def main() -> int:
    print(f"python {sys.version.split()[0]} at {sys.executable}")
    for name, purpose in (NEEDED | USEFUL).items():
        if name in missing({name: purpose}):
            print(f"  {name:14} MISSING{' and needed' if name in NEEDED else ''}: {purpose}")
        else:
            print(f"  {name:14} {version(name)}")
    lacking = missing(NEEDED)
    if lacking:
        print(f"\nCannot run: {', '.join(lacking)} missing.")
        print(f"With a network: {sys.executable} -m pip install {' '.join(lacking)}")
        print("Without one: bring the wheels, `pip install --no-index --no-deps --target FOLDER *.whl`, and put FOLDER")
        print("into PYTHONPATH (docs/gpu.md).")
        return 1
    import torch

    if not torch.cuda.is_available():
        print(
            "\ntorch finds no GPU here: the tests of kernels run under Triton's interpreter, and the others are skipped"
        )
        return 0
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        print(f"  GPU {index}: {card.name}, {card.total_memory / 2**30:.0f} GiB, compute {card.major}.{card.minor}")
    print(f"  CUDA {torch.version.cuda}")
    return 0


def version(name: str) -> str:
    names = metadata.packages_distributions().get(name, [name])
    try:
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return "found"


if __name__ == "__main__":
    sys.exit(main())
