"""Our kernels at the shapes of `make first-gpu`, each made small where it stands on a stand-in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from benchmarks.gpu import engines, first, plan
from benchmarks.gpu.card import Card
from benchmarks.gpu.engines import SHAPES
from cluster.cli.check.gpu_kernels import tried as kernels_tried
from engine.devices.cuda_device import CudaDevice
from engine.kernel_trial.trial import KernelTrial

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "n_routed_experts": 8, "num_local_experts": 8, "vocab_size": 512,
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def small_shape(shape: dict[str, Any]) -> dict[str, Any]:
    small = {key: value for key, value in SMALL.items() if key in shape}
    return {**shape, **small, **({"num_key_value_heads": 4} if "kv_lora_rank" in small else {})}


def interpreted() -> bool:
    return torch.cuda.is_available() and "stand-in" in torch.cuda.get_device_name()


@pytest.mark.slow
@pytest.mark.parametrize("name", first.TRIED)
def test_all_kernels_are_right_in_their_trial(name, monkeypatch):
    shape, options = first.TRIED[name]
    if interpreted():
        monkeypatch.setitem(engines.SHAPES, shape, small_shape(SHAPES[shape]))
    monkeypatch.setattr(first, "TRIED", {name: (shape, options)})
    (numbers,) = first.tried(Card(1e12, 1e14))
    ((unit, right),) = numbers.items()
    assert unit == f"right of {right} kernels, {name}"
    assert right > 4


class Counted(TorchDispatchMode):
    """Counts what a trial does on the host as it compares: operations of torch but for views, waits for a number,
    launches of our kernels, and graphs."""

    NO_LAUNCH = ("empty", "detach", "_unsafe_view", "lift_fresh", "alias", "new_empty")
    WAITS = ("_local_scalar_dense", "equal", "nonzero")

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside = False
        launch, compare, capture = GridExecutor.__call__, KernelTrial.compare, CudaDevice.capture

        def count_launch(grid: Any, *args: Any, **options: Any) -> None:
            self.counts["launches"] += self._inside
            with _disable_current_modes():
                launch(grid, *args, **options)

        def count_graph(device: Any, run: Any) -> Any:
            self.counts["graphs"] += self._inside
            return capture(device, run)

        def count_inside(*args: Any) -> Any:
            self._inside = True
            try:
                return compare(*args)
            finally:
                self._inside = False

        monkeypatch.setattr(GridExecutor, "__call__", count_launch)
        monkeypatch.setattr(CudaDevice, "capture", count_graph)
        monkeypatch.setattr(KernelTrial, "compare", count_inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if self._inside and name in self.WAITS:
            self.counts["waits"] += 1
        elif self._inside and not func.is_view and not name.startswith(self.NO_LAUNCH):
            self.counts["operations"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="the interpreter counts launches")
def test_a_comparison_takes_as_many_operations_as_the_plan_counts(tmp_path, monkeypatch):
    monkeypatch.setitem(engines.SHAPES, "8B", small_shape(SHAPES["8B"]))
    engines.write_shape("8B", tmp_path)
    with Counted(monkeypatch) as counted:
        verdicts = kernels_tried(str(tmp_path), {})
    calls = sum(verdict.calls for verdict in verdicts)
    found = {name: count / calls for name, count in counted.counts.items()}
    planned = {"operations": plan.OPERATIONS, "waits": plan.WAITS, "launches": plan.LAUNCHES, "graphs": plan.GRAPHS}
    assert found == pytest.approx(planned, rel=0.25)
