"""Options of a served model and its pools."""

from __future__ import annotations

from typing import Any

import msgspec
import pydantic
from pydantic import Field

from cluster.autoscaling.slo import Limits, PoolSettings, RoleSettings, Slo
from cluster.config.pool_section import EngineSection, PoolSection
from cluster.config.section import Section, given, section_of
from deployments.billing.prices import FREE, Prices
from deployments.openai.formats.families import ReasoningParserName, ToolCallParserName
from deployments.routing.config import Role
from engine.config import EngineConfig
from engine.engine_options import BLOCK_SIZES, GPU_DEFAULTS
from engine.errors import ConfigError
from engine.model.checkpoint import smollm2
from engine.options.handoff import HandoffConfig
from placement.spec import GroupSpec

ROLE_KEYS = {"routing", "num_replicas", "min_replicas", "max_replicas"}  # that may differ if roles change
ALIKE = ("dtype", "quantization", "determinism")  # keys that must agree, or fingerprints of encode engines differ
HandoffSection = section_of(HandoffConfig, without={"role"})
PricesSection = section_of(Prices, without=set())


class LoraModule(Section):
    """A LoRA adapter, with the keys of vLLM's --lora-modules."""

    name: str = Field(min_length=1, max_length=256)  #: what clients send as `model`
    path: str  #: folder that every replica has, or a Hub id
    base_model_name: str | None = None  #: `parent` of the adapter for clients; None: the model's `name`


class LoraSection(Section):
    """Source of LoRA adapters that the configuration does not list (docs/lora.md)."""

    dynamic_folder: str | None = Field(default=None, min_length=1)
    """Folder with an adapter in each sub-folder, which is served under the name of the sub-folder. Every ingress and
    replica must have the folder, or read it from a bucket (`s3://`, `gs://`, `abfss://`)."""


class SloSection(Section):
    """Latency targets of autoscaling (docs/autoscaling.md)."""

    ttft_ms: float = Field(default=Slo().ttft_ms, gt=0)  #: time to the first token, from when an engine could begin
    itl_ms: float = Field(default=Slo().itl_ms, gt=0)  #: time from token to token


class ModelSection(Section):
    """One served model."""

    name: str = Field(min_length=1)  #: name that clients send as `model`
    aliases: list[str] = Field(default=[])  #: further names that clients may send
    model: str
    """`pocket`, `smollm2`, `default`, a folder, a GGUF file, or a Hub id, optionally followed by @ and a revision."""

    chat_template: str | None = None  #: Jinja file on the machine that builds the ingress, or its text
    default_chat_template_kwargs: dict[str, Any] = Field(default={})  #: variables that requests may change
    generation_config: str = "auto"
    """Source of default sampling parameters: `auto` for the model's generation_config.json, `vllm` for none, or a
    folder with another generation_config.json."""
    override_generation_config: dict[str, Any] = Field(
        default={}
    )  #: default sampling parameters: `{"temperature": 0.6}`
    tool_call_parser: ToolCallParserName = "auto"  #: `auto` infers it from the chat template (docs/tool_calls.md)
    reasoning_parser: ReasoningParserName = "auto"  #: `auto` infers it likewise
    engine: EngineSection = EngineSection()  # type: ignore[valid-type]  #: engine options of all pools (EngineConfig)
    decode: PoolSection = PoolSection()  #: replicas that answer requests
    prefill: PoolSection | None = None  #: replicas that only compute prompts for `decode`
    encode: PoolSection | None = None  #: replicas that only encode images for `decode` and `prefill` (docs/images.md)
    handoff: HandoffSection | None = None  # type: ignore[valid-type]  #: options of handoffs (docs/handoff.md)
    lora_modules: list[LoraModule] = Field(default=[])  #: LoRA adapters; a mapping of names to paths also works
    lora: LoraSection = LoraSection()  #: other sources of LoRA adapters (docs/lora.md)
    slo: SloSection = SloSection()  #: latency targets of autoscaling: `ttft_ms`, `itl_ms` (docs/autoscaling.md)
    prices: PricesSection = PricesSection()  # type: ignore[valid-type]  #: money for costs (docs/costs.md)
    sdc_check_every: int | None = Field(default=None, ge=1)
    """Recompute one in this many answers on another replica while all replicas are idle, to detect silent data
    corruption; for example 1000 (docs/sdc_check.md)."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _choose_default(cls, given: Any) -> Any:
        """Replace `default` by the model that is available, and let clients use its own name too."""
        if not isinstance(given, dict) or given.get("model") != smollm2.DEFAULT:
            return given
        chosen = smollm2.default_model()
        own = [] if given.get("name") == chosen else [chosen]
        return {**given, "model": chosen, "aliases": given.get("aliases") or own}

    @pydantic.field_validator("lora_modules", mode="before")
    @classmethod
    def _list_modules(cls, given: Any) -> Any:
        return [{"name": name, "path": path} for name, path in given.items()] if isinstance(given, dict) else given

    @property
    def has_prices(self) -> bool:
        return self.price_list() != FREE

    def price_list(self) -> Prices:
        """Return the prices. Raises ConfigError if one is negative."""
        prices: dict[str, float] = dict(self.prices)
        for name, price in prices.items():
            if price < 0:
                raise ConfigError(f"prices.{name} of model {self.name!r}", price, "at least 0")
        return Prices(**prices)

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters, or a folder that may have some."""
        return bool(self.lora_modules or self.lora.dynamic_folder)

    @property
    def autoscales(self) -> bool:
        """Whether the autoscaling policy sizes any of its pools."""
        return self.switches_roles or any(pool.max_replicas is not None for pool in self.pools.values())

    @property
    def switches_roles(self) -> bool:
        """Whether replicas change between the prefill and the decode pool."""
        return bool(self._handoff_options.get("switch_roles"))

    @property
    def deployments(self) -> dict[str, Role]:
        """The role of the replicas of each Serve deployment of the model, by name; `decode` if they change roles."""
        if self.switches_roles:
            return {f"pd-{self.name}": "decode", **{f"{r}-{self.name}": r for r in self.pools if r == "encode"}}
        return {f"{role}-{self.name}": role for role in self.pools}

    def bounds(self, role: Role) -> tuple[int, int]:
        """Return the minimum and maximum number of replicas of a pool; of both pools together if roles change."""
        low, high = self.pools[role].bounds
        if role == "decode" and self.switches_roles:
            assert self.prefill is not None
            more = self.prefill.bounds
            return low + more[0], high + more[1]
        return low, high

    @property
    def pools(self) -> dict[Role, PoolSection]:
        pools: dict[Role, PoolSection | None] = {"decode": self.decode, "prefill": self.prefill, "encode": self.encode}
        return {role: pool for role, pool in pools.items() if pool is not None}

    def check(self, path: str) -> None:
        """Raise ConfigError for contradictory keys. path: position of this section."""
        self.price_list()
        for role, pool in self.pools.items():
            pool.check(f"{path}.{role}")
            try:
                self.engine_config(role)
            except ConfigError as error:
                key, value, limit = error.args
                raise ConfigError(f"{path}.{self._section(role, key)}{key}", value, limit) from None
        if self.encode is not None:
            self._check_encode(path)
        if self.switches_roles:
            self._check_roles(path)
        engines = [self.engine_config(role) for role in self.pools if role != "encode"]
        handoff: Any = self.handoff
        if handoff is not None and handoff.move_requests and len(self.pools) == 1 and engines[0].handoff is None:
            limit = "given, or `encode`, or several decode replicas, because of the `handoff` section"
            raise ConfigError(f"{path}.prefill", None, limit)
        for key, needed in EngineConfig.for_adapters().items() if self.has_adapters else ():
            for value in (getattr(engine, key) for engine in engines):
                if value != needed:
                    limit = f"{str(needed).lower()}, or left out, because the model has adapters"
                    raise ConfigError(f"{path}.engine.{key}", value, limit)
        for key in ("pipeline_parallel_size", "pipeline_layers"):
            values = [getattr(engine, key) for engine in engines]
            if len(set(values)) > 1:
                limit = f"the value of the decode pool ({values[0]}), because each stage hands over its own layers"
                raise ConfigError(f"{path}.prefill.engine.{key}", values[1], limit)
        sizes = {role: self.engine_config(role).block_size for role in self.pools}
        if len(set(sizes.values())) > 1:
            limit = f"the block size of the decode pool ({sizes['decode']}), because blocks are transferred unchanged"
            role = next(role for role, size in sizes.items() if size != sizes["decode"])
            raise ConfigError(f"{path}.{self._section(role, 'block_size')}block_size", sizes[role], limit)

    @property
    def same_bits(self) -> bool:
        """Whether an answer has the same bits in any batch and in all engines (docs/determinism.md)."""
        engines = [self.engine_config(role) for role in self.pools if role != "encode"]
        same = len({engine.layout for engine in engines}) == 1 or engines[0].determinism == "strict"
        plain = not any(engine.quantization or engine.kv_cache_dtype != "auto" for engine in engines)
        return same and plain and not any(map(self.on_gpu, self.pools))

    def _check_roles(self, path: str) -> None:
        """Raise ConfigError unless both pools have equal settings, except ROLE_KEYS, as their replicas change pools."""
        if self.prefill is None:
            raise ConfigError(f"{path}.prefill", None, "given, because `handoff.switch_roles` needs two pools")
        ours, theirs = (pool.model_dump(exclude=ROLE_KEYS) for pool in (self.decode, self.prefill))
        ours |= {f"engine.{key}": value for key, value in ours.pop("engine").items()}
        theirs |= {f"engine.{key}": value for key, value in theirs.pop("engine").items()}
        for key, wanted in ours.items():
            if theirs[key] != wanted:
                limit = f"the value of `decode` ({wanted}), because of `handoff.switch_roles`"
                raise ConfigError(f"{path}.prefill.{key}", theirs[key], limit)

    def _check_encode(self, path: str) -> None:
        assert self.encode is not None
        encode, decode = self.engine_config("encode"), self.engine_config()
        if encode.tensor_parallel_size != 1:
            limit = "1, because every rank would encode all images"
            raise ConfigError(f"{path}.encode.engine.tensor_parallel_size", encode.tensor_parallel_size, limit)
        if not self.encode.bounds[0]:
            limit = (
                "at least 1: without replicas, other engines would encode the images, and no replica would ever start"
            )
            raise ConfigError(f"{path}.encode.min_replicas", 0, limit)
        for key in ALIKE:
            value, wanted = getattr(encode, key), getattr(decode, key)
            if value != wanted:
                limit = f"the value of the decode pool ({wanted}); otherwise the two pools cannot exchange images"
                raise ConfigError(f"{path}.{self._section('encode', key)}{key}", value, limit)

    def engine_config(self, role: Role = "decode") -> EngineConfig:
        options = (GPU_DEFAULTS if self.on_gpu(role) else {}) | self._options(role)
        if options.get("block_size") is None:  # set it here: ingresses and routers need it, and know no device
            options["block_size"] = BLOCK_SIZES["cuda" if any(map(self.on_gpu, self.pools)) else "cpu"]
        for_adapters = EngineConfig.for_adapters()
        if self.has_adapters:
            options = for_adapters | options
        if role == "encode":  # not as in the other pools
            options["tensor_parallel_size"] = given(self.pools[role].engine).get("tensor_parallel_size", 1)
            options["pipeline_parallel_size"], options["pipeline_layers"], options["data_parallel_size"] = 1, None, 1
            options["enable_eplb"] = False
            options |= dict.fromkeys(for_adapters, False)
            options["all2all_backend"] = "auto"
        if role != "encode" and self.encode is not None:
            options["encode"] = HandoffConfig(role="decode", **self._handoff_options)
        return EngineConfig(model=self.model, handoff=self._handoff_config(role), **options)

    def _handoff_config(self, role: Role) -> HandoffConfig | None:
        """Return the options of handoffs of a pool's engines; None if they hand nothing over."""
        asked = self._handoff_options
        if role == "encode" or self.prefill is not None:
            return HandoffConfig(role="decode" if self.switches_roles and role == "prefill" else role, **asked)
        if asked.get("move_requests") or asked.get("enable_prefix_fetching"):
            return HandoffConfig(role="replica", **asked)
        if self.decode.bounds[1] == 1 or not asked.get("move_requests", True):
            return None
        # NIXL opens memory that nothing protects, so it is used only if the section asks for moves, or names it
        return HandoffConfig(role="replica", **{"transport": "tcp", **asked})

    @property
    def _handoff_options(self) -> dict[str, Any]:
        """The keys that the `handoff` section sets."""
        return {} if self.handoff is None else given(self.handoff)

    def group_spec(self, role: Role = "decode") -> GroupSpec:
        pool = self.pools[role]
        return GroupSpec(
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            num_ranks=self.engine_config(role).world_size,
            accelerator_type=pool.accelerator_type,
            label_selector=pool.label_selector,
            strategy=pool.placement_strategy,
            startup_timeout_s=pool.startup_timeout_s,
            stall_timeout_s=pool.stall_timeout_s,
        )

    def pool_settings(self, role: Role) -> PoolSettings:
        """Return a pool's settings for the autoscaling policy."""
        low, high = self.pools[role].bounds
        slo = Slo(**dict(self.slo))
        if role != "decode" or not self.switches_roles:
            return PoolSettings(self.name, role, slo, self._limits(role, low, high), None, self._replica_hour(role))
        assert self.prefill is not None
        least = {name: self.pools[name].min_replicas for name in ("decode", "prefill")}
        lows = {name: 1 if count is None else count for name, count in least.items()}
        min_total, max_total = self.bounds("decode")
        roles = RoleSettings(
            prefill=self._limits("prefill", lows["prefill"], max_total - max(1, lows["decode"])),
            min_total=min_total,
            max_total=max_total,
            initial_prefill=self.prefill.bounds[0],
        )
        limits = self._limits("decode", lows["decode"], max_total - lows["prefill"])
        return PoolSettings(self.name, role, slo, limits, roles, self._replica_hour(role))

    def _replica_hour(self, role: Role) -> float:
        """Return the price of an hour of a replica, which may have several engines."""
        return self.price_list().engine_hour * self.engine_config(role).data_parallel_size

    def _limits(self, role: Role, low: int, high: int) -> Limits:
        pool = self.pools[role]
        return Limits(
            min_replicas=low,
            max_replicas=high,
            max_num_seqs=self.engine_config(role).slots,
            upscale_delay_s=pool.upscale_delay_s,
            downscale_delay_s=pool.downscale_delay_s,
            scale_to_zero_delay_s=pool.scale_to_zero_delay_s,
        )

    def shown(self) -> dict[str, Any]:
        """Return all keys with the values in force. Keys of `engine` are given per pool, since their values may
        differ."""
        shown: dict[str, Any] = self.model_dump(mode="json", exclude={"engine", "handoff"})
        for role in self.pools:
            shown[role]["engine"] = msgspec.to_builtins(self.engine_config(role))
        return shown

    def on_gpu(self, role: Role) -> bool:
        """Return whether the engines of a pool compute on GPUs."""
        device = self._options(role).get("device", "auto")
        return device == "cuda" or (device == "auto" and self.pools[role].num_gpus > 0)

    def _options(self, role: Role) -> dict[str, Any]:
        """Return the fields of EngineConfig that `engine` sections set."""
        return given(self.engine) | given(self.pools[role].engine)

    def _section(self, role: Role, key: str) -> str:
        """Return the section in which a key of EngineConfig was set."""
        if key.startswith("handoff."):
            return ""
        return f"{role}.engine." if key in given(self.pools[role].engine) else "engine."
