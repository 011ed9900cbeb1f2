"""Whether KV has the same bits in any batch, and in which engines (docs/determinism.md)."""

from __future__ import annotations

import hashlib

from engine.config import EngineConfig
from engine.devices.device_kind import kind_of
from engine.model.ops import dispatch
from engine.runner.rank_setup import RankSetup

DIGITS = 16


def why_not_canonical(setup: RankSetup) -> str:
    """Return why the bits of a token's KV may depend on what is computed beside it; empty if they do not."""
    config, model, ranks = setup.config.of(EngineConfig), setup.whole, setup.tp.all_ranks
    dtype = str(setup.dtype).removeprefix("torch.")
    reasons = {
        "bits depend on the batch on a GPU": setup.torch_device.type != "cpu",
        f"bits depend on the batch in {dtype} without Manta's kernels": not dispatch.cpu_kernels(
            setup.dtype, setup.torch_device
        ),
        "bits depend on the batch with quantized weights": model.quantization is not None,
        "bits depend on the batch where transformers' code computes the model": bool(model.transformers),
        "bits depend on the batch with torch_compile": config.torch_compile,
        "bits may depend on the batch with kv_cache_dtype": setup.kv_dtype != setup.dtype,
        "bits were not measured with ranks on several machines": ranks.local_size < ranks.size,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def numerics_of(setup: RankSetup, fingerprint: str) -> str:
    """Return a digest that is equal for engines whose KV has the same bits; empty if it need not have the same bits in
    one engine. fingerprint: of the engine."""
    if why_not_canonical(setup):
        return ""
    config = setup.config.of(EngineConfig)
    ranks = "any" if config.determinism == "strict" else config.layout
    text = f"{fingerprint} ranks={ranks} device={kind_of(setup.torch_device)}"
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
