"""A row travels only to the ranks that have one of its experts, by FlashInfer's one-sided kernels over NVLink: vLLM's
`flashinfer_nvlink_one_sided`. Each rank writes rows into memory of the others, and reads results from there.

The memory has room for the same number of rows from each rank, and counts stay on the device, so CUDA graphs can hold
it. FlashInfer adds up what comes back for a row in float32, in the order of the token's experts: the router's order,
not that of ranks. So sums may have other bits than with the other exchanges, and `determinism: strict` is refused.

This has not run on a GPU yet. Names as in flashinfer 0.6 and 0.7.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.config import ONE_SIDED
from engine.distributed.exchange.members import PER_RANK, Counts, Members, Ranks
from engine.errors import ConfigError

NOWHERE = -1  # place of an expert in a row that no rank has sent
MOST_RANKS = 64  # kMaxRanks of moeAlltoAllKernels.h
TOP_K = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # experts per token for which moeAlltoAllKernels.cu has kernels


@dataclass(frozen=True, slots=True)
class RowSizes:
    """What the memory has to have room for."""

    tokens: int  #: of the largest step of an engine
    hidden: int
    k: int
    item: int  #: bytes of a number


class Communicator:
    """FlashInfer's CommBackend over a group of ranks. It is used while memory is mapped."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def Get_rank(self) -> int:
        return self._ranks.rank

    def Get_size(self) -> int:
        return self._ranks.size

    def allgather(self, data: Any) -> list[Any]:
        sent = base64.b64encode(msgspec.msgpack.encode(data)).decode()
        return [msgspec.msgpack.decode(base64.b64decode(answer)) for answer in self._ranks.exchange(sent)]

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data if self._ranks.rank == root else None)[root]

    def barrier(self) -> None:
        self._ranks.exchange("")

    def Split(self, color: int, key: int) -> Communicator:
        return self


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows that other ranks have written, with room for more."""

    x: Tensor
    places: Tensor
    weights: Tensor
    members: Members
    counts: Counts
    alltoall: Any

    def combine(self, sums: Tensor) -> Tensor:
        members, size = self.members, self.members.share_size(self.counts)
        return members.of_engine(self.alltoall.combine(sums.view(members.ranks.size, size, -1), size), self.counts)

    def combine_pairs(self, parts: Tensor) -> Tensor:
        raise NotImplementedError(f"{ONE_SIDED} adds up the products of a row")


class OneSided:
    """FlashInfer's MoeAlltoAll."""

    can_be_captured = True

    def __init__(self, members: Members, sizes: RowSizes):
        """Every rank has to call this at the same time. Raises ConfigError if FlashInfer is not installed, or has no
        kernels for these sizes."""
        if importlib.util.find_spec("flashinfer") is None:
            raise ConfigError("all2all_backend", ONE_SIDED, "another one, because flashinfer is not installed")
        if (size := members.ranks.size) > MOST_RANKS:
            why = f"between at most {MOST_RANKS} ranks, not {size}"
            raise ConfigError("all2all_backend", ONE_SIDED, f"another one, because flashinfer exchanges rows {why}")
        if sizes.k not in TOP_K:
            why = f"with {', '.join(map(str, TOP_K))} experts per token, not {sizes.k}"
            raise ConfigError("all2all_backend", ONE_SIDED, f"another one, because flashinfer exchanges rows {why}")
        comm, mnnvl = (importlib.import_module(f"flashinfer.comm{name}") for name in ("", ".mnnvl"))
        kernels = importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")
        ranks, tokens = members.ranks, -(-sizes.tokens // members.width)
        row = sizes.hidden * sizes.item
        self._members = members
        self._alltoall = kernels.MoeAlltoAll(
            mapping=comm.Mapping(
                ranks.size, ranks.rank, torch.cuda.device_count(), tp_size=ranks.size, moe_ep_size=ranks.size
            ),
            max_num_tokens=tokens,
            top_k=sizes.k,
            num_experts=ranks.size * PER_RANK,  # it finds the rank of a place by dividing
            workspace_size_per_rank=kernels.moe_a2a_get_workspace_size_per_rank(
                ranks.size, tokens, row + sizes.k * (4 + sizes.item), row
            ),
            mnnvl_config=mnnvl.MnnvlConfig(comm_backend=Communicator(ranks)),
        )

    def dispatch(self, x: Tensor, places: Tensor, weights: Tensor, counts: Counts) -> WrittenRows:
        share, size = self._members.share_of(counts), self._members.share_size(counts)
        sent = places[share].int().contiguous()
        payloads = [x[share].contiguous(), sent, weights[share].to(x.dtype).contiguous()]
        found = self._alltoall.dispatch(
            token_selected_experts=sent,
            input_payloads=payloads,
            runtime_max_tokens_per_rank=size,
            invalid_token_expert_id=NOWHERE,
            expert_id_payload_index=1,
        )
        every_x, every_place, every_weight = (part.flatten(0, 1) for part in found)
        return WrittenRows(every_x, every_place, every_weight, self._members, counts, self._alltoall)
