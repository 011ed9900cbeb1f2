"""What CUDA does with tensors of two devices: on a card, and so by what stands in for one (tests/gpu/stand_in.py)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HOST = torch.arange(4.0)
CARD = HOST.to("cuda") if torch.cuda.is_available() else HOST
MIXED = {
    "a sum": lambda: CARD + HOST,
    "in place on the host": lambda: HOST.clone().add_(CARD),
    "in place on the card": lambda: CARD.clone().sub_(HOST),
    "an output": lambda: torch.add(CARD, CARD, out=HOST.clone()),
    "a product": lambda: CARD[None] @ HOST[:, None],
    "a list": lambda: torch.cat([CARD, HOST]),
    "a condition": lambda: torch.where(CARD > 1, CARD, HOST),
    "an index of the card": lambda: HOST[CARD.long()],
    "a value of the host": lambda: CARD.clone().__setitem__(slice(2), HOST[:2]),
    "part of a new tensor": lambda: torch.zeros(4, 4)[0].add_(CARD),
    "a layer": lambda: torch.nn.functional.linear(CARD[None], HOST[None]),
}
ALLOWED = {
    "a number of the host": lambda: CARD + torch.tensor(1.0),
    "a number": lambda: CARD * 2,
    "an index of the host": lambda: CARD[torch.tensor([1, 2])],
    "a copy": lambda: CARD.clone().copy_(HOST),
    "made like it": lambda: torch.zeros_like(CARD) + CARD,
    "made there": lambda: torch.ones(4, device="cuda") + CARD,
    "moved": lambda: HOST.to(CARD.device) + CARD,
    "moved to another": lambda: HOST.to(CARD) + CARD,
    "views": lambda: CARD.view(2, 2).T[0] + CARD[:2],
    "new": lambda: CARD.new_zeros(4) + CARD,
}


@pytest.mark.parametrize("run", MIXED.values(), ids=MIXED)
def test_operations_that_mix_devices_raise(run):
    with pytest.raises(RuntimeError, match=r"same device|indices should be either|expected device"):
        run()


@pytest.mark.parametrize("run", ALLOWED.values(), ids=ALLOWED)
def test_operations_on_the_card_stay_there(run):
    found = run()
    assert found.is_cuda and found.device == torch.device("cuda", 0) and not found.cpu().is_cuda


def test_tensors_without_values_stay_so():
    assert torch.empty(3, device="meta").is_meta and CARD.to("meta").is_meta and HOST.to(device="meta").is_meta
    with torch.device("meta"):
        assert torch.empty(3).is_meta


def test_a_tensor_of_the_card_is_no_array_and_its_copy_is_one():
    for array in (Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert cuda"):
            array(CARD)
    copy = CARD.cpu()
    copy.numpy()[:] = 7
    assert CARD.tolist() == [0, 1, 2, 3]


def test_a_copy_to_the_card_is_apart_from_the_host():
    host = torch.zeros(3)
    card = host.to("cuda")
    host += 1
    assert card.tolist() == [0, 0, 0]


def test_what_a_thread_makes_is_on_the_card_too():
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(4, device="cuda") + CARD))
    thread.start()
    thread.join()
    assert found[0].is_cuda


def test_a_kernel_takes_no_tensor_of_the_host():
    pytest.importorskip("triton")
    from engine.model.ops.gpu.norm import rms_norm

    rows = torch.ones(2, 64)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        rms_norm(rows, torch.ones(64), 1e-6, 0.0)
    assert rms_norm(rows.to("cuda"), torch.ones(64, device="cuda"), 1e-6, 0.0).is_cuda
