"""Calls of libraries that need a GPU are bound to what these declare. See library_signatures.py."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.distributed import tp_group
from tests.engine.model.ops.gpu.library_signatures import DECLARATIONS, FLASH_INFER, compare, declared

C10D = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


def test_a_call_that_a_library_does_not_declare_is_refused():
    call = FLASH_INFER.bound(lambda **found: found)
    given = dict.fromkeys(("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"), 0)
    assert call(**given, window_left=3)["window_left"] == 3
    with pytest.raises(TypeError, match="window_size"):
        call(**given, window_size=3)
    with pytest.raises(TypeError, match="max_seq_len"):
        call(**{name: value for name, value in given.items() if name != "max_seq_len"})


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_a_source_that_declares_other_arguments_than_were_recorded_is_found(declaration):
    source = f"def {declaration.name}({declaration.arguments}): ..."
    assert compare(declaration, source, "here")
    assert not compare(declaration, source.replace("softmax_scale=None, ", "").replace("lse=None, ", ""), "here")


class Declared:
    """Stands for a class of torch.distributed that this build lacks, and takes the calls that its stubs declare."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Declared:
        self._bind("__init__", *args, **kwargs)
        return self

    def __getattr__(self, method: str) -> Any:
        if method == "Options":
            return Declared("Options")
        return lambda *args, **kwargs: self._bind(method, *args, **kwargs)

    def _bind(self, method: str, *args: Any, **kwargs: Any) -> None:
        source, problems = C10D.read_text(encoding="utf-8"), []
        for owner in (self._name, "Backend", "ProcessGroup"):
            for _, arguments in declared(source, f"{owner}.{method}"):
                try:
                    inspect.signature(eval(f"lambda {arguments}: None")).bind(self, *args, **kwargs)
                except TypeError as error:
                    problems.append(str(error))
                else:
                    return
        raise TypeError(f"{self._name}.{method}: {problems or 'not declared'}")


def test_nccl_is_called_as_torchs_stubs_declare(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Declared("ProcessGroupNCCL"), raising=False)
    group = tp_group.ProcessGroup(tp_group.nccl(None, 0, 2, "127.0.0.1", timedelta(seconds=1)), 2)
    assert group.all_reduce(torch.ones(3)).shape == (3,)
    assert group.all_gather(torch.ones(3)).shape == (2, 3)
    group.abort("a test")
    with pytest.raises(TypeError, match="not declared"):
        dist.ProcessGroupNCCL(None, 0, 2, None).all_reduce_fast()
