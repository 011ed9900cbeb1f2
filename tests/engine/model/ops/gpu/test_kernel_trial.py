"""An engine's trial of its kernels passes those that are right, and names the one that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import KernelInterface

from engine.assembly.open_runner import load_runner
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.kernel_trial import check, steps
from engine.kernel_trial.check import check_kernels, try_kernels
from engine.kernel_trial.early_launch import compare_steps
from engine.kernel_trial.rank_alone import RankAlone
from engine.kernel_trial.reduced_model import reduced
from engine.kernel_trial.trial import KernelTrial, Verdict
from engine.kernel_trial.twins import twins
from engine.model.ops import dispatch
from engine.model.ops import norm as plain_norm
from engine.model.ops.gpu import (
    activation,
    attention,
    dependent_launch,
    latent_attention,
    logits,
    low_rank,
    norm,
    rope,
    sampling,
)
from engine.model.ops.gpu.experts import moe, routing
from engine.model.ops.gpu.recurrent import causal_conv, gates, linear_attention
from engine.runner.graphs import gpu_layers
from tests.engine.model.ops.gpu.paged import DEVICE
from tests.engine.model.ops.gpu.test_model import FAMILIES
from tests.models import with_slow

ON_A_CARD = torch.cuda.is_available()  # or on what stands in for one
OPTIONS: dict[str, Any] = {"block_size": 16, "device": DEVICE.type, "allow_untested_kernels": True, "num_threads": 1}
MODELS = {family: replace(config, max_position_embeddings=256) for family, config in FAMILIES.items()}
PLANTED: list[tuple[str, ModuleType, str, str]] = [  # a family, one of its kernels, and the op that is wrong with it
    ("Qwen 3", norm, "rms_norm_kernel", "norm.add_rms_norm"),
    ("Qwen 3", rope, "rotate_and_write_kernel", "rope.rotate_and_write"),
    ("Qwen 3", attention, "attend_kernel", "attention.paged_attention"),
    ("Qwen 3", activation, "gated_kernel", "activation.silu_mul"),
    ("Qwen 3", low_rank, "expand_kernel", "low_rank.add"),
    ("gpt-oss", activation, "swigluoai_kernel", "moe.mix_experts" if ON_A_CARD else "activation.swigluoai_mul"),
    ("GLM 4.5", routing, "add_shared_kernel", "routing.add_shared"),
    ("GLM 4.5", routing, "top_k_of_groups_kernel", "routing.top_k_sigmoid"),
    ("Qwen 3.5", causal_conv, "causal_conv_kernel", "causal_conv.causal_conv"),
    ("Qwen 3.5", gates, "gates_kernel", "gates.gates"),
    ("Qwen 3.5", linear_attention, "linear_attention_kernel", "linear_attention.linear_attention"),
    ("Qwen 3.5", norm, "gated_rms_norm_kernel", "norm.gated_rms_norm"),
    ("DeepSeek V2", latent_attention, "latent_kernel", "latent_attention.latent_attention"),
    ("Qwen 3", sampling, "best_of_row_kernel", "sampling.sample_rows"),
    ("Qwen 3", logits, "mask_kernel", "logits.apply_masks"),
    ("Qwen 3", logits, "penalise_kernel", "logits.penalise"),
    *([("Qwen 3 MoE", moe, "grouped_kernel", "moe.mix_experts")] if ON_A_CARD else []),
]


@pytest.fixture(scope="module", autouse=True)
def own_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_A_CARD:
            patch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
            patch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
            patch.setattr(check, "is_gpu", lambda name: True)
        yield


class Wrong:
    """A kernel that writes the last row of its results too large by half, and another number beside the first of its
    whole numbers, no larger than it may be."""

    def __init__(self, kernel: Any):
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            before = [(each, each.clone()) for each in args if isinstance(each, Tensor)]
            self._kernel[grid](*args, **options)
            for each, old in before:
                changed = (each.float() != old.float()).nonzero()
                if len(changed) and each.is_floating_point():
                    each[changed[-1][0]] *= 1.5
                elif len(changed):
                    first = tuple(changed[0])
                    each[first] += 1 if each[first] == 0 else -1

        return launch


@dataclass(frozen=True)
class Tried:
    verdicts: list[Verdict]
    alone: set[str]
    """Names of the kernels that its steps launched where nothing was compared."""

    @property
    def wrong(self) -> dict[str, Verdict]:
        return {verdict.op: verdict for verdict in self.verdicts if verdict.wrong}


def tried(family: str, **options: Any) -> Tried:
    """A trial."""
    alone: set[str] = set()
    comparing: list[bool] = []
    get, compare, compute = KernelInterface.__getitem__, KernelTrial.compare, check.compute_steps

    def launcher(kernel: Any, grid: Any) -> Any:
        if comparing and not comparing[-1]:
            alone.add(kernel.fn.__name__)
        return get(kernel, grid)

    def during(is_compared: bool, function: Any) -> Any:
        def call(*args: Any) -> Any:
            comparing.append(is_compared)
            try:
                return function(*args)
            finally:
                comparing.pop()

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        patch.setattr(KernelTrial, "compare", during(True, compare))
        patch.setattr(check, "compute_steps", during(False, compute))
        config = EngineConfig(**OPTIONS, **options)
        return Tried(try_kernels(config, MODELS[family], Path("/nowhere"), load_runner), alone)


@pytest.fixture(scope="module")
def faulty() -> Tried:
    """A trial with a wrong kernel of norms, a wrong attention, and an activation that has no twin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "rms_norm_kernel", Wrong(norm.rms_norm_kernel))
        patch.setattr(attention, "attend_kernel", Wrong(attention.attend_kernel))
        patch.delitem(twins(), activation.silu_mul)
        return tried("Qwen 3")


def test_wrong_kernels_are_named_and_no_other_one(faulty):
    assert set(faulty.wrong) == {"norm.rms_norm", "norm.add_rms_norm", "attention.paged_attention"}


def test_a_kernel_that_is_not_compared_is_noted(faulty):
    assert faulty.alone == {"gated_kernel"}


@pytest.mark.parametrize("family", with_slow(MODELS, set(MODELS) - {"Qwen 3"}))
def test_kernels_that_are_right_pass_their_trial_which_leaves_none_out(family):
    trial = tried(family)
    assert len(trial.verdicts) > 4 and not trial.alone
    assert not trial.wrong
    assert all(verdict.calls for verdict in trial.verdicts)
    assert not ON_A_CARD or any(verdict.graphs for verdict in trial.verdicts)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "module", "kernel", "op"), PLANTED)
def test_a_wrong_kernel_is_named(family, module, kernel, op, monkeypatch):
    monkeypatch.setattr(module, kernel, Wrong(getattr(module, kernel)))
    wrong = set(tried(family, enable_lora=module is low_rank).wrong)
    assert wrong - {"norm.rms_norm"} == {op}, "the two norms share a kernel"


@pytest.fixture
def refused(monkeypatch) -> set[Any]:
    found: set[Any] = set()
    monkeypatch.setattr(dispatch, "refused", found)
    return found


def start(monkeypatch, verdicts: list[Verdict]) -> None:
    """The start of an engine whose trial has these verdicts."""
    monkeypatch.setattr(check, "try_kernels", lambda *args: verdicts)
    check_kernels(EngineConfig(**OPTIONS), MODELS["Qwen 3"], Path("/nowhere"), load_runner)


def test_plain_torch_takes_the_place_of_a_wrong_norm_with_one_line_in_the_log(faulty, refused, monkeypatch, caplog):
    start(monkeypatch, [verdict for verdict in faulty.verdicts if verdict.op != "attention.paged_attention"])
    assert refused == {norm.rms_norm, norm.add_rms_norm}
    chosen = plain_norm.select(torch.float32, DEVICE)
    assert chosen == (plain_norm.rms_norm_plain, plain_norm.add_rms_norm_plain)
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 2
    assert all(line.startswith("kernel norm.") and line.endswith("which takes its place") for line in lines)


def test_a_wrong_attention_ends_the_start_with_the_versions_of_its_compilers(faulty, refused, monkeypatch):
    with pytest.raises(StartupError, match=r"kernel attention.paged_attention: a row of .*triton .*ptxas .*CUDA 13.1"):
        start(monkeypatch, faulty.verdicts)


class Calls(TorchFunctionMode):
    """Notes the functions of torch that are called in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Racing:
    """A kernel that reads too early, unless a kernel of torch runs right before it."""

    def __init__(self, kernel: Any):
        self._right, self._wrong = kernel, Wrong(kernel)

    def __getitem__(self, grid: Any) -> Any:
        calls = Calls()
        calls.__enter__()

        def launch(*args: Any, **options: Any) -> None:
            calls.__exit__(None, None, None)
            (self._right if "add_" in calls.names else self._wrong)[grid](*args, **options)

        return launch


@pytest.fixture
def early(monkeypatch) -> None:
    """Launch kernels early, as on Hopper, in steps of few tokens."""
    if "stand-in" in torch.cuda.get_device_name():
        monkeypatch.setattr(dependent_launch, "supported", lambda device: True)
        monkeypatch.setattr(dependent_launch, "gdc_wait", lambda: None)
        monkeypatch.setattr(dependent_launch, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(steps, "PROMPTS", (12, 9, 5))
    monkeypatch.setattr(steps, "CHUNKS", ({0: 8}, {0: 4, 1: 9}, {0: 1, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 3}))
    monkeypatch.setattr(gpu_layers, "warm_up_plans", lambda *sizes: [])


def compared_steps() -> Verdict:
    config = replace(check.trial_config(EngineConfig(**OPTIONS)), max_num_batched_tokens=16)
    return compare_steps(load_runner(config, reduced(MODELS["Qwen 3"]), Path("/nowhere"), RankAlone(1)))


@pytest.mark.slow
@pytest.mark.skipif(not ON_A_CARD, reason="needs graphs")
def test_whole_steps_are_the_same_with_early_launch_and_without(early):
    verdict = compared_steps()
    assert not verdict.wrong
    assert (verdict.calls, verdict.graphs, verdict.error) == (8, 8, 0.0)


@pytest.mark.slow
@pytest.mark.skipif(not ON_A_CARD, reason="needs graphs")
def test_a_kernel_that_is_wrong_when_others_start_early_is_found_in_whole_steps(early, monkeypatch):
    monkeypatch.setattr(activation, "gated_kernel", Racing(activation.gated_kernel))
    assert "a row of what steps write differs by " in compared_steps().wrong


def test_kernels_start_one_after_another_where_whole_steps_were_wrong_and_are_tried_again(monkeypatch, caplog):
    wrong = Verdict("dependent_launch.begin", dependent_launch.begin, wrong="a row differs by 9.0%")
    early = []

    def try_kernels(*args: Any) -> list[Verdict]:
        early.append(dependent_launch.in_use(DEVICE))
        return [wrong] if early[-1] else []

    monkeypatch.setattr(check, "try_kernels", try_kernels)
    monkeypatch.setattr(dependent_launch, "_refused", [])
    monkeypatch.setattr(dependent_launch, "supported", lambda device: True)
    check_kernels(EngineConfig(**OPTIONS), MODELS["Qwen 3"], Path("/nowhere"), load_runner)
    assert early == [True, False] and not dependent_launch.options(DEVICE)
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line == "early launch: a row differs by 9.0%; kernels start one after another from now on"


def test_a_trial_that_fails_ends_the_start_with_the_versions_and_the_error(monkeypatch):
    class Failing:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(norm, "rms_norm_kernel", Failing())
    with pytest.raises(StartupError, match=r"trial of kernels failed \(.*triton .*\): RuntimeError.*illegal memory"):
        check_kernels(EngineConfig(**OPTIONS), MODELS["Qwen 3"], Path("/nowhere"), load_runner)
