"""A transformers model with our layers and the interface of native models."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, UnsupportedArchitecture
from engine.model.auto_config import read_config
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.embedding import LMHead, TiedLMHead, VocabEmbedding
from engine.model.shard import Shard, Sharded, ShardPlan, Shards
from engine.model.tensor_names import is_of_text
from engine.model.transformers_backend.attention import (
    NAME,
    TRIAL,
    AttentionError,
    Call,
    CurrentStep,
    PagedAttention,
    record_rotation,
    run_trial,
)
from engine.model.transformers_backend.layers import (
    Embedding,
    LayerMaker,
    MergedPart,
    MergedProduct,
    ModelHead,
    OurExperts,
    TiedHead,
)
from engine.model.transformers_backend.names import PIECES, CheckpointNames
from engine.model.transformers_backend.rope import replace_rotation

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 3
MERGED = re.compile(r"\.(?:qkv|gate_up)_proj\.(q|k|v|gate|up)\.")
FAILURES = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError, AssertionError,
)  # fmt: skip


class EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty` allocate on the meta device. Most weights are made by it and replaced before use."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class ShapesOnly(TPGroup):
    """A group for the trial run of a model: its collectives return tensors of the right shape without communication."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


class Hidden(nn.Module):
    """A stand-in for the model below the head, so that transformers' code computes logits from given hidden states."""

    states: Tensor

    def __getattr__(self, name: str) -> Any:
        return self.__dict__.get(name, self)  # some models call a part of it (`self.model.decoder`)

    def forward(self, *_: object, **__: object) -> MoEModelOutputWithPastAndCrossAttentions:
        return MoEModelOutputWithPastAndCrossAttentions(last_hidden_state=self.states)


class HeadCall(nn.Module):
    """The head as transformers calls it: [1, rows, hidden] -> [1, rows, vocab_size]. Keeps its input and output."""

    def __init__(self, head: LMHead):
        super().__init__()
        self.head = head
        self.asked: Tensor | None = None
        self.gave: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.asked, self.gave = hidden, self.head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return self.gave


class TransformersModel(Sharded):
    """A model computed by transformers' code: input_ids [tokens] int64 -> hidden [tokens, hidden]."""

    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        """Raises UnsupportedArchitecture, or ConfigError if the model cannot be split over `tp.size` ranks."""
        super().__init__()
        calls = find_calls(cfg, tp)
        with EmptyOnMeta():
            causal = make(cfg, NAME, self.dtype)
        self._names = CheckpointNames(causal, set(causal.state_dict()))
        if self._names.refused:
            reason = f"its checkpoint needs the conversion {', '.join(sorted(self._names.refused))}"
            raise UnsupportedArchitecture(cfg.architecture, reason)
        self.lm_head, self._head_path = replace_layers(causal, cfg, tp, self._names)
        self._step = CurrentStep()
        for path, call in calls.items():
            attention: Any = causal.get_submodule(path)
            paged = PagedAttention(call, cfg, tp, self._step, self.dtype, self.device)
            attention.paged_attention = paged
            if call.rotated:
                replace_rotation(attention, paged.rotate_later)
        materialize(causal, self.device)
        self._prefix = self._names.prefix
        self.base = getattr(causal, self._prefix)
        self._hidden = Hidden()
        setattr(causal, self._prefix, self._hidden)
        self.causal = causal.requires_grad_(False)
        self.base.requires_grad_(False)
        fixed_rope(self.base)
        self._plain_head: bool | None = None
        logger.info(
            "model: %s is computed by the code of transformers %s over our attention and linear layers",
            cfg.architecture,
            transformers.__version__,
        )

    def add_encoders(self) -> None:
        """Add nothing: only the text part is computed."""

    def forward(self, input_ids: Tensor, batch: Batch) -> Tensor:
        self._step.begin(batch)
        out = self.base(input_ids=input_ids[None], position_ids=batch.positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocab_size] float32 for hidden [rows, hidden]."""
        return self.lm_head(hidden) if self._head_is_plain(hidden) else self._transformed_logits(hidden)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row, and its id, for hidden [rows, hidden]."""
        if self._head_is_plain(hidden):
            return self.lm_head.best(hidden)
        values, ids = self._transformed_logits(hidden).max(-1)
        return values, ids

    def _transformed_logits(self, hidden: Tensor) -> Tensor:
        self._hidden.states = hidden[None]
        logits: Tensor = self.causal(input_ids=None, use_cache=False).logits
        return logits[0].float()

    def _head_is_plain(self, hidden: Tensor) -> bool:
        """Return whether transformers' code changes neither the hidden states that the head gets nor the logits that it
        returns."""
        if self._plain_head is None:
            logits = self._transformed_logits(hidden)
            call: Any = self.causal.get_submodule(self._head_path)
            self._plain_head = torch.equal(call.asked[0], hidden) and torch.equal(call.gave[0], logits)
            call.asked = call.gave = None
        return self._plain_head

    def checkpoint_name(self, path: str) -> str:
        """Return the canonical name of a tensor from its path in this module."""
        own, _, rest = path.lstrip(".").partition(".")
        if own == "lm_head":
            return f"{self._head_path}.{rest}"
        return MERGED.sub(r".\1_proj.", f"{self._prefix}.{rest}") if own == "base" else rest

    def canonical_name(self, name: str) -> str | None:
        return self._names(name) if is_of_text(name) else None

    def shards(self) -> Shards:
        """Return the tensors of transformers' own modules, which every rank holds whole."""
        shards: Shards = {}
        for path, tensor in self._own_tensors():
            merged = next((m for m in PIECES if path.endswith(f".{m}")), None)
            if merged is None or not self._names.is_merged(path):
                shards[path] = whole(tensor)
                continue
            parent = path.removesuffix(f".{merged}")
            for i, expert in enumerate(tensor):
                for piece, part in zip(PIECES[merged], expert.chunk(len(PIECES[merged])), strict=True):
                    shards[f"{parent}.{i}.{piece}.weight"] = whole(part)
        return shards

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        modules = self.named_modules(remove_duplicate=False)
        ours = [path for path, module in modules if path and isinstance(module, Sharded)]
        for path, tensor in self.state_dict(keep_vars=True).items():
            if not any(path.startswith(f"{own}.") for own in ours):
                yield path, tensor.data


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate memory on `device` for tensors that are still on the meta device (`EmptyOnMeta`)."""
    exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                dtype = torch.float32 if any(part in f"{path}.{name}" for part in exact) else tensor.dtype
                if tensor.is_meta or dtype != tensor.dtype:
                    made = torch.empty(tensor.shape, dtype=dtype, device=device)
                    kind[name] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made


def make(cfg: ModelConfig, attention: str, dtype: torch.dtype) -> Any:
    """Return transformers' model without values, on torch's default device. attention: a registered name."""
    config, _ = read_config(json.loads(cfg.transformers), cfg.architecture)
    config.quantization_config = None
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not cls._supports_attention_backend:
        reason = f"transformers {transformers.__version__} has no exchangeable attention for it"
        raise UnsupportedArchitecture(cfg.architecture, reason)
    with no_init_weights():
        return cls._from_config(config, dtype=dtype, attn_implementation=attention, experts_implementation="eager")


def replace_layers(causal: Any, cfg: ModelConfig, tp: ShardPlan, names: CheckpointNames) -> tuple[LMHead, str]:
    """Replace modules of transformers' model by our layers. Return the head, and the path where it is called."""
    embedding, output = causal.get_input_embeddings(), causal.get_output_embeddings()
    if type(output) is not nn.Linear:
        raise UnsupportedArchitecture(cfg.architecture, "its head is no linear layer")
    head_path = next(path for path, module in causal.named_modules() if module is output)
    if tp.size > 1 and not causal.tp_plan:
        raise ConfigError("tensor_parallel_size", tp.size, f"1: transformers has no plan to split {cfg.architecture}")
    k = getattr(causal.config, "num_experts_per_tok", 0)
    maker = LayerMaker(cfg, tp, causal.tp_plan or {}, names.is_merged, k)
    done: tuple[str, ...] = ()
    for path, module in list(causal.named_modules()):
        if module is output or module is embedding or path.startswith(done):
            continue
        if (made := maker.make(path, module)) is not None:
            causal.set_submodule(path, made)
            done = (*done, f"{path}.")
        elif (merged := maker.merge(path, module)) is not None:
            module.add_module("qkv_proj", merged)
            product = MergedProduct(merged)
            for i, name in enumerate(merged.weights):
                module.add_module(f"{name}_proj", MergedPart(product, i))
                done = (*done, f"{path}.{name}_proj")
    own = ours_for_embedding(embedding, tp)
    if own is not None:
        causal.set_input_embeddings(own)
    head: LMHead
    if cfg.tie_word_embeddings:
        if own is None:
            raise UnsupportedArchitecture(cfg.architecture, "its head is tied to an embedding of an unknown kind")
        head = (TiedLMHead if output.bias is None else TiedHead)(own, cfg.head_format)
    else:
        head_type = LMHead if output.bias is None else ModelHead
        head = head_type(output.out_features, output.in_features, tp, cfg.head_format)
    causal.set_submodule(head_path, HeadCall(head))
    return head, head_path


def ours_for_embedding(embedding: nn.Module, tp: ShardPlan) -> VocabEmbedding | None:
    """Return our embedding for a module; None unless it is a plain table, possibly scaled by one number."""
    if not isinstance(embedding, nn.Embedding):
        return None
    scale: Any = getattr(embedding, "embed_scale", None)
    if type(embedding) is not nn.Embedding and (
        not type(embedding).__name__.endswith("ScaledWordEmbedding") or scale is None
    ):
        return None
    if isinstance(scale, Tensor):
        # rounded to the model's dtype, as in transformers; in a trial there are no values
        scale = None if scale.is_meta else scale.to(torch.get_default_dtype()).item()
    return Embedding(embedding.num_embeddings, embedding.embedding_dim, tp, scale)


def find_calls(cfg: ModelConfig, tp: ShardPlan) -> dict[str, Call]:
    """Return how each layer calls attention, by the path of its module, found in a trial without values.

    Raises UnsupportedArchitecture if paged attention cannot serve them, or ConfigError if the model cannot be split.
    """
    calls = try_out(cfg, ShardPlan())
    if tp.size > 1:
        try:
            try_out(cfg, ShardPlan(ShapesOnly(tp.rank, tp.size)))
        except UnsupportedArchitecture as e:
            raise ConfigError("tensor_parallel_size", tp.size, f"1 for {cfg.architecture}: {e.args[1]}") from e
    return calls


def try_out(cfg: ModelConfig, tp: ShardPlan) -> dict[str, Call]:
    try:
        with torch.device("meta"), torch.no_grad():
            causal = make(cfg, TRIAL, torch.float32)
            fixed_rope(causal)
            names = CheckpointNames(causal, set(causal.state_dict()))
            replace_layers(causal, replace(cfg, quantization=None), tp, names)
            for module in causal.modules():
                replace_rotation(module, record_rotation)
                if isinstance(module, OurExperts) or hasattr(module, "_apply_gate"):
                    module.forward = lambda hidden_states, *_, **__: torch.empty_like(hidden_states)
            ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64)
            positions = torch.arange(TRIAL_TOKENS)[None]
            ones = torch.ones(ids.shape, dtype=torch.int64, device="cpu")  # some models read whether it masks any
            found = run_trial(
                lambda: causal.eval()(input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False)
            )
            paths = {module: path for path, module in causal.named_modules()}
            calls = {paths[module]: call for module, call in found.items()}
        check(cfg, calls, tp)
    except AttentionError as e:
        raise UnsupportedArchitecture(cfg.architecture, str(e)) from e
    except FAILURES as e:
        why = (str(e).strip() or "no message").splitlines()[0]
        reason = f"a trial of transformers' code with our layers fails: {type(e).__name__}: {why}"
        raise UnsupportedArchitecture(cfg.architecture, reason) from e
    return calls


def check(cfg: ModelConfig, calls: dict[str, Call], tp: ShardPlan) -> None:
    """Raise AttentionError unless every layer attends once, with the heads that the configuration states."""
    layers = sorted(call.layer for call in calls.values())
    if layers != list(range(cfg.num_layers)):
        missing = cfg.num_layers - len(set(layers) & set(range(cfg.num_layers)))
        raise AttentionError(f"{missing} of its {cfg.num_layers} layers have no attention that could be replaced")
    for call in calls.values():
        if call.head_dim != cfg.head_dim:
            raise AttentionError(f"heads of layer {call.layer} have {call.head_dim} values, not {cfg.head_dim}")
        window = cfg.window[call.layer]
        if window is not None and not cfg.keeps_all_kv and window != call.mask.window:
            raise AttentionError(f"layer {call.layer} sees more than the {window} tokens whose KV is kept")
        whole, own = (cfg.num_heads, cfg.num_kv_heads), (cfg.num_heads // tp.size, cfg.kv_heads_per_rank(tp.size))
        if (call.heads, call.kv_heads) not in (whole, own):
            raise AttentionError(f"layer {call.layer} has {call.heads} heads and {call.kv_heads} KV heads, not {whole}")


def fixed_rope(base: nn.Module) -> None:
    """Keep rotary frequencies fixed; transformers changes some with the longest sequence of a batch.

    No sequence exceeds `max_position_embeddings`, up to which they would stay the same, and auto_config.py has chosen
    the factors of `longrope`.
    """
    for module in base.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]


def whole(tensor: Tensor) -> tuple[Shard, Tensor]:
    tensor = tensor.view(1) if tensor.dim() == 0 else tensor
    return Shard(tuple(tensor.shape), 0, 0, tensor.shape[0]), tensor
