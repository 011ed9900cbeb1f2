"""The state of a scheduler in bytes, without text: from there a tape can be replayed.

The bytes are a pickle, because a scheduler consists of many small objects that refer to each other. A tape comes from
another machine, so `load` makes only the classes that a scheduler consists of, and calls nothing else.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from types import FunctionType, MethodType
from typing import Any

import msgspec

from engine.core.block_pool import BlockPool
from engine.core.block_usage import BlockAccount, BlockUsage
from engine.core.costs.step_cost import StepTimes
from engine.core.features.handoffs import HandoffManager
from engine.core.features.holds.hold_table import Hold, PromptOfHold
from engine.core.features.images.encoder_cache_manager import EncoderCacheManager
from engine.core.features.images.image_handoffs import ImageHandoffs, number_of
from engine.core.features.speculator import Speculator, any_number
from engine.core.request import PrefixUse, Request
from engine.core.request_cost import RequestCost
from engine.core.scheduler import Scheduler
from engine.core.tape.answers import NO_TOKEN, ORDINARY, STAND_INS, Answers, NoDrafter, ReplayedChannel
from engine.core.tape.inputs import lora_without_path, params_without_text
from engine.model.state import max_drafts
from engine.spec_decode.draft_length import SequenceDrafts
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.lora import LoRARequest
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.plan import ON_DEVICE, StepPlan
from engine.wire.remote_request import NOBODY, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams

ENGINE = Scheduler.__module__.removesuffix("core.scheduler")  # `engine.`, or `manta.engine.` in a wheel
MODULES = ("core.", "wire.", "spec_decode.", "config", "text.free_text", "kv_transfer.no_channel",
           "model.kv_groups", "model.state", "kv_offload.tier_index")  # fmt: skip
NOT_OF_A_SCHEDULER = ("core.server", "core.build", "core.engine", "core.serving.", "core.tape.recorder")
ELSEWHERE = {
    ("collections", "Counter"), ("collections", "OrderedDict"), ("collections", "defaultdict"),
    ("collections", "deque"), ("functools", "partial"), ("itertools", "count"), ("builtins", "set"),
    ("builtins", "frozenset"), ("msgspec._utils", "rebuild"),
}  # fmt: skip


class UnknownState(Exception):
    """The bytes are not the state of a scheduler of this version."""


class Zeros:
    """Stands for a list of tokens."""

    def __init__(self, count: int):
        self._count = count

    def __reduce__(self) -> tuple[Any, ...]:
        return zeros, (self._count,)


def zeros(count: int) -> list[int]:
    return [ORDINARY] * count


def nobody() -> Peer:
    return NOBODY


def method_of(owner: Any, name: str) -> Any:
    if name.startswith("_") or not type(owner).__module__.startswith(ENGINE):
        raise UnknownState(f"{name} of {type(owner).__name__}")
    return getattr(owner, name)


FUNCTIONS = (zeros, nobody, method_of, any_number, max_drafts)


def reduced(thing: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return found


def changed(thing: Any, **fields: Any) -> tuple[Any, ...]:
    """Return how to pickle an object with other values of some fields, and without attributes that hide methods."""
    make, args, *rest = reduced(thing)
    state = rest[0] if rest else None
    if state is None:  # of an enumeration
        return make, args
    if isinstance(state, tuple):  # of a class with slots
        return make, args, (state[0], state[1] | fields)
    # CPython 3.11 loads attributes slowly from a dict that was asked for, as pickle has just done
    object.__setattr__(thing, "__dict__", {**state})
    kind = type(thing)
    own = {name: value for name, value in state.items() if not callable(getattr(kind, name, None))}
    return make, args, own | fields


def of_request(request: Request) -> tuple[Any, ...]:
    return changed(
        request,
        tokens=Zeros(len(request.tokens)),
        reply_to="",
        timeline=[],
        prompt_logprobs=None if request.prompt_logprobs is None else [None],
        cost=RequestCost(),
    )


def of_drafts(drafts: SequenceDrafts) -> tuple[Any, ...]:
    proposed = [token if token == ON_DEVICE else ORDINARY if token >= 0 else NO_TOKEN for token in drafts.proposed]
    return changed(drafts, prediction=[ORDINARY] if drafts.prediction else [], proposed=proposed)


def of_plan(plan: StepPlan) -> tuple[Any, ...]:
    drafts: Any = {entry: Zeros(len(tokens)) for entry, tokens in plan.drafts.items()}
    return reduced(msgspec.structs.replace(plan, added=[], blocks=[], masks=b"", drafts=drafts, encoded=[]))


def of_remote_request(asked: RemoteRequest) -> tuple[Any, ...]:
    tokens: Any = Zeros(len(asked.token_ids))
    return reduced(msgspec.structs.replace(asked, token_ids=tokens, cache_salt=""))


def of_image_handoffs(handoffs: ImageHandoffs) -> tuple[Any, ...]:
    receiving = {number_of(handoff_id): image for handoff_id, image in handoffs.receiving.items()}
    return changed(handoffs, receiving=receiving, actions=[], channel=ReplayedChannel(Answers(), handoffs.channel.peer))


def of_method(method: MethodType) -> tuple[Any, ...]:
    return method_of, (method.__self__, method.__name__)


class Writer(pickle.Pickler):
    """Pickles a scheduler without what is said in its requests."""

    def __init__(self, file: io.BytesIO, vocab_size: int):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._rules: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            Request: of_request,
            PrefixUse: partial(changed, hashes=[], salt=""),
            SequenceDrafts: of_drafts,
            StepPlan: of_plan,
            RemoteRequest: of_remote_request,
            MethodType: of_method,
            SamplingParams: lambda params: reduced(params_without_text(params, vocab_size)),
            LoRARequest: lambda lora: reduced(lora_without_path(lora)),
            PromptOfHold: lambda prompt: changed(prompt, tokens=Zeros(len(prompt.tokens)), cache_salt=""),
            Peer: lambda peer: (nobody, ()) if peer is NOBODY else reduced(peer),
            BlockPool: lambda pool: changed(
                pool,
                usage=BlockUsage(len(pool.ref_counts()), pool.usage.now_ns, pool.num_used),
                shared=BlockAccount(),
                observers=[],
            ),
            Hold: lambda hold: changed(hold, accounts=[BlockAccount() for _ in hold.needed]),
            HandoffManager: partial(changed, actions=[]),
            ImageHandoffs: of_image_handoffs,
            EncoderCacheManager: partial(changed, _pixels={}),
            MultiModalFeatureSpec: lambda image: reduced(msgspec.structs.replace(image, data={})),
            Speculator: lambda part: changed(part, _drafter=None if part.has_weights else NoDrafter()),
        }

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if (rule := self._rules.get(kind)) is not None:
            return rule(thing)
        if kind is type or kind is FunctionType or not kind.__module__.startswith(ENGINE):
            return NotImplemented
        return changed(thing) if isinstance(getattr(thing, "__dict__", None), dict) else NotImplemented


class Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, answers: Answers, trusted: tuple[str, ...]):
        super().__init__(file)
        self._answers, self._trusted = answers, trusted

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ELSEWHERE:
            return super().find_class(module, name)
        inside = module.removeprefix(ENGINE)
        known = inside != module and inside.startswith(MODULES) and not inside.startswith(NOT_OF_A_SCHEDULER)
        if not (known or module.startswith(self._trusted)) or "." in name:
            raise UnknownState(f"{module}.{name} is no part of a scheduler")
        found = super().find_class(module, name)
        if found in STAND_INS:
            return partial(found, self._answers)
        if not isinstance(found, type) and found not in FUNCTIONS and not module.startswith(self._trusted):
            raise UnknownState(f"{module}.{name} is no class")
        return found


def dump(scheduler: Scheduler, times: StepTimes) -> bytes:
    """Return the state of a scheduler. times: step times on which its decisions depend."""
    file = io.BytesIO()
    Writer(file, scheduler.limits.vocab_size).dump((scheduler, times))
    return file.getvalue()


def load(state: bytes, answers: Answers, trusted: tuple[str, ...] = ()) -> tuple[Scheduler, StepTimes]:
    """Return a scheduler in this state, and its step times. Requests have no tokens and no hashes of blocks. Raises
    UnknownState.

    answers: what drafters, grammars and links have answered from then on. trusted: further modules whose classes it may
    make.
    """
    try:
        scheduler, times = Reader(io.BytesIO(state), answers, trusted).load()
    except (pickle.UnpicklingError, AttributeError, ImportError, TypeError, EOFError, IndexError, KeyError) as error:
        raise UnknownState(f"{type(error).__name__}: {error}") from error
    return scheduler, times


def with_key(state: bytes, key: bytes) -> bytes:
    """Return a state in which every hash is replaced by a hash with a key, so that nobody can confirm a guess."""
    result = bytearray(state)
    for opcode, value, position in pickletools.genops(state):
        if opcode.name not in ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"):
            continue
        if isinstance(value, bytes) and position is not None and value and len(value) % BLOCK_HASH_BYTES == 0:
            start = position + {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}[opcode.name]
            result[start : start + len(value)] = hashes_with_key(value, key)
    return bytes(result)


def hashes_with_key(hashes: bytes, key: bytes) -> bytes:
    """Replace each of some joined hashes by one with a key."""
    size = BLOCK_HASH_BYTES
    parts = (hashes[i : i + size] for i in range(0, len(hashes), size))
    return b"".join(blake2b(part, digest_size=size, key=key).digest() for part in parts)
