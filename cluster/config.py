"""Section `args` of serve_config.yaml, parsed strictly and converted to the frozen objects that each folder defines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field, create_model

from cluster.autoscaling.slo import POLICIES, POLICY, Limits, PoolSettings, RoleSettings, Slo
from deployments.billing.prices import FREE, Prices
from deployments.billing.usage_files import UsageConfig
from deployments.console.config import ConsoleConfig
from deployments.http.middleware import AuthConfig
from deployments.http.validation import UnknownFields, expected
from deployments.multimodal.config import ImageConfig
from deployments.observability.tracing import TracingConfig
from deployments.openai.batches.config import BatchConfig
from deployments.openai.formats.families import ReasoningParserName, ToolCallParserName
from deployments.quotas.limits import KeyLimits
from deployments.routing.config import Role, RoutingConfig
from deployments.storage.config import StoreConfig
from engine.config import BLOCK_SIZES, GPU_DEFAULTS, EngineConfig, HandoffConfig
from engine.errors import ConfigError, Described, without_credentials
from engine.model.checkpoint import smollm2
from placement.console_log import LogConfig, LogFormat, LogLevel
from placement.spec import GroupSpec, Strategy

BUILDER = "manta:build"  # the import_path of our applications
BUILDERS = (BUILDER, f"{__package__}.app:build")  # the same function by its own name
HOST, PORT = "127.0.0.1", 8000  # default address of the API


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _section_of(config: type, without: set[str], **types: Any) -> type[Section]:
    """Return a section with one key per field of the dataclass, so that the two always agree. types: keys whose type
    differs from that of their field."""
    hints = get_type_hints(config) | types
    keys: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(config) if f.name not in without}
    return create_model(config.__name__.replace("Config", "Section"), __base__=Section, **keys)


def given(section: Section) -> dict[str, Any]:
    """Return the keys that are set in the file, with their values."""
    return {key: getattr(section, key) for key in section.model_fields_set}


ROLE_KEYS = {"routing", "num_replicas", "min_replicas", "max_replicas"}  # that may differ if roles change
ALIKE = ("dtype", "quantization", "determinism")  # keys that must agree, or fingerprints of encode engines differ
# model and handoff are one level higher; EngineConfig reads the JSON objects itself
JSON_OBJECTS = dict.fromkeys(("speculative", "kv_events_config", "eplb_config"), dict[str, Any] | None)
EngineSection = _section_of(EngineConfig, without={"model", "handoff", "encode"}, **JSON_OBJECTS)
HandoffSection = _section_of(HandoffConfig, without={"role"})
RoutingSection = _section_of(RoutingConfig, without=set())
ImageSection = _section_of(ImageConfig, without=set())
PricesSection = _section_of(Prices, without=set())
TracingSection = _section_of(TracingConfig, without=set())


class PoolSection(Section):
    """Replicas that run a model, or replicas that compute prompts or images for them."""

    engine: EngineSection = EngineSection()  # type: ignore[valid-type]  # mypy cannot see into create_model
    """Keys that override the model's `engine` section in this pool."""
    routing: RoutingSection = RoutingSection()  # type: ignore[valid-type]
    """Choice of a replica for a request, or for a prompt (docs/routing.md)."""
    num_replicas: int = Field(default=1, ge=1)  #: fixed number; for autoscaling, set the next two instead
    min_replicas: int | None = Field(default=None, ge=0)  #: default 1 with max_replicas; 0 scales to zero
    max_replicas: int | None = Field(default=None, ge=1)  #: turns autoscaling on
    upscale_delay_s: float = Field(default=3.0, ge=0)  #: time for which more replicas must be desired continuously
    downscale_delay_s: float = Field(default=300.0, ge=0)  #: time for which fewer replicas must be desired continuously
    scale_to_zero_delay_s: float = Field(default=600.0, ge=0)  #: time without work, if min_replicas is 0
    num_cpus: float = Field(default=1.0, ge=0)  #: CPUs of each rank, and its threads unless `engine.num_threads` is set
    num_gpus: float = Field(default=0.0, ge=0, le=1)  #: GPUs of each of `tensor_parallel` x `pipeline_parallel` ranks
    accelerator_type: str | None = Field(default=None, min_length=1)  #: GPU that a rank's node must have: `L4`
    label_selector: dict[str, str] = Field(default_factory=dict)  #: labels that a rank's node must have
    placement_strategy: Strategy = "PACK"  #: Ray's: PACK: few nodes; STRICT_PACK: one; STRICT_SPREAD: one per rank
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    """Maximum number of sequences in one replica; None for the number that its engine may run and queue."""
    startup_timeout_s: float = Field(default=600.0, gt=0)  #: limit for starting the ranks and loading the weights
    stall_timeout_s: float = Field(default=10.0, gt=0)
    """Time after which a replica with queued work is replaced if its engine ends no step. It must exceed the time of
    any step: a large model on a CPU may need a minute for `max_num_batched_tokens` of a prompt."""
    drain_s: float = Field(default=60.0, ge=0)  #: time for which a stopping replica may continue its requests

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas."""
        if self.max_replicas is None:
            return self.num_replicas, self.num_replicas
        return 1 if self.min_replicas is None else self.min_replicas, self.max_replicas

    def check(self, path: str) -> None:
        """Raise ConfigError for contradictory keys."""
        low, high = self.min_replicas, self.max_replicas
        if low is not None and (high is None or high < low):
            raise ConfigError(f"{path}.max_replicas", high, f"at least min_replicas ({low})")
        if high is not None and "num_replicas" in self.model_fields_set:
            raise ConfigError(f"{path}.num_replicas", self.num_replicas, "left out if max_replicas is given")
        if not self.num_cpus and not self.num_gpus:
            raise ConfigError(f"{path}.num_cpus", 0, "above 0 if num_gpus is 0")
        try:
            self.routing_config()
        except ConfigError as error:
            key, value, limit = error.args
            raise ConfigError(f"{path}.{key}", value, limit) from None

    def routing_config(self) -> RoutingConfig:
        return RoutingConfig(**dict(self.routing))


class IngressSection(Section):
    """The HTTP API (docs/http_api.md)."""

    num_replicas: int = Field(default=1, ge=1)  #: number of HTTP servers (ingresses)
    num_cpus: float = Field(default=0.1, ge=0)  #: CPUs of each ingress
    max_ongoing_requests: int = Field(default=4096, ge=1)  #: HTTP requests that one ingress serves at a time
    request_timeout_s: float = Field(
        default=600.0, gt=0
    )  #: time limit for every request; a request may set a lower one
    drain_s: float = Field(default=600.0, ge=0)  #: time for which a stopping ingress may continue its requests
    max_replays: int = Field(default=3, ge=0)  #: number of times that a sequence may resume after its replica has died
    max_waiting: int = Field(default=1024, ge=1)  #: sequences of a model that may wait in one ingress; else 429
    max_waiting_tokens: int = Field(default=2**22, ge=1)  #: prompt tokens of sequences that wait; else 429
    api_keys_file: str | None = Field(
        default=None, min_length=1
    )  #: file of keys, on every node with an ingress; without keys every client is admitted
    api_keys: list[str] = Field(default=[])  #: more keys, in the form of that file's lines (`manta hash-key`)
    key_limits: dict[str, KeyLimits] = Field(default={})  #: limits by the names of keys (docs/quotas.md)
    console: bool = True  #: serve the page at `/` (docs/console.md)
    console_texts: bool = False
    """Show prompts and outputs of requests on the console's page and in `manta explain`, to everyone who has a key."""
    root_path: str = Field(default="", pattern=r"^(/[^/\s]+)*$")  #: prefix of all paths at a proxy in front: `/llm`
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)  #: limit for a request's body that is not a file
    max_upload_bytes: int = Field(default=200 * 2**20, ge=1024)  #: limit for a file; body_timeout_s grows in proportion
    body_timeout_s: float = Field(default=60.0, gt=0)  #: time for a request's body to arrive; else 408
    admin_keys: list[str] = Field(default=[])
    """Names of keys that may load and unload LoRA adapters and fetch the tape, empty for all; and that may make and
    change API keys."""
    allow_runtime_key_updating: bool = False  #: admin_keys may make API keys and change limits (docs/quotas.md)
    allow_runtime_lora_updating: bool = False  #: requests may load and unload LoRA adapters (docs/lora.md)
    cors_origins: list[str] = Field(default=[])  #: origins of web pages that may send requests; `*` for all
    unknown_fields: UnknownFields = "ignore"  #: `ignore` or `refuse` request fields that no API here has
    store: str | None = Field(default=None, min_length=1)
    """Store for responses, answers and batches, which all ingresses share and which survives restarts:
    `redis://host:6379/0`, or on one machine `sqlite:///path`. None keeps responses and answers in memory, and batches
    in `batch_dir`."""
    store_bytes: int = Field(default=256 * 2**20, ge=2**16)  #: maximum size of the store in memory, or of its file
    response_ttl_s: float = Field(default=24 * 3600.0, gt=0)  #: time for which a response is stored
    idempotency_ttl_s: float = Field(default=24 * 3600.0, gt=0)  #: time for which an Idempotency-Key's answer is stored
    batch_dir: str | None = Field(default="~/.local/state/manta/batches", min_length=1)
    """Folder for the contents of files and batches, shared by all ingresses; on several machines, `store` must be a
    Redis, too; null for none (docs/batches.md)."""
    images: ImageSection = ImageSection()  # type: ignore[valid-type]  #: limits on request images (docs/images.md)
    usage_dir: str | None = Field(
        default=None, min_length=1
    )  #: folder of daily files of usage and costs (docs/costs.md)
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")  #: of the models' `prices`, for these files
    batch_max_in_flight: int = Field(default=16, ge=1)  #: requests of a batch at a time, if no other requests wait

    def auth(self) -> AuthConfig:
        """Return the limits of the HTTP edge. Raises ConfigError for invalid keys."""
        auth = AuthConfig(
            api_keys_file=self.api_keys_file,
            api_keys=tuple(self.api_keys),
            admin_keys=tuple(self.admin_keys),
            allow_key_updating=self.allow_runtime_key_updating,
            allow_lora_updating=self.allow_runtime_lora_updating,
            root_path=self.root_path,
            max_body_bytes=self.max_body_bytes,
            max_upload_bytes=self.max_upload_bytes,
            body_timeout_s=self.body_timeout_s,
            cors_origins=tuple(self.cors_origins),
            unknown_fields=self.unknown_fields,
            key_limits=self.key_limits,
            num_ingresses=self.num_replicas,
        )
        auth.keys()
        return auth

    def check_limits(self, models: list[ModelSection]) -> None:
        """Raise ConfigError for limits of keys that could not be kept."""
        if self.allow_runtime_key_updating and not self.admin_keys:
            raise ConfigError("ingress.admin_keys", [], "at least one name, because of allow_runtime_key_updating")
        if self.allow_runtime_key_updating and self.store is None:
            raise ConfigError("ingress.store", None, "given, because it keeps the keys of allow_runtime_key_updating")
        if self.key_limits and self.api_keys_file is None and not self.api_keys:
            raise ConfigError("ingress.api_keys_file", None, "given, or ingress.api_keys, because of key_limits")
        if self.key_limits and self.num_replicas > 1 and self.store is None:
            raise ConfigError("ingress.store", None, "given, because several ingresses share the key_limits")
        for name, limits in self.key_limits.items():
            path, unpriced = f"ingress.key_limits.{name}", [model.name for model in models if not model.has_prices]
            if unpriced and any(budget.max_budget is not None for budget in limits.budget_limits):
                limit = f"left out, because model {unpriced[0]!r} has no prices; max_engine_seconds needs none"
                raise ConfigError(f"{path}.budget_limits.max_budget", Described("a number"), limit)
            by_priority = any(model.engine_config().scheduling_policy == "priority" for model in models)
            if limits.priority and not by_priority:
                limit = "0, because no model has the scheduling_policy priority"
                raise ConfigError(f"{path}.priority", limits.priority, limit)

    def store_config(self) -> StoreConfig:
        """Return the options of the store of responses and answers. Raises ConfigError."""
        config = StoreConfig(
            url=self.store,
            max_bytes=self.store_bytes,
            response_ttl_s=self.response_ttl_s,
            idempotency_ttl_s=self.idempotency_ttl_s,
        )
        config.check()
        return config

    def image_config(self) -> ImageConfig:
        """Return the limits on images. Raises ConfigError."""
        return ImageConfig(**dict(self.images))

    def usage_config(self) -> UsageConfig:
        return UsageConfig(folder=self.usage_dir, currency=self.currency)

    def batches(self) -> BatchConfig:
        return BatchConfig(folder=self.batch_dir, max_in_flight=self.batch_max_in_flight)


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
        if self.has_adapters and not all(engine.enable_lora for engine in engines):
            raise ConfigError(f"{path}.engine.enable_lora", False, "true, or left out, because the model has adapters")
        for key in ("pipeline_parallel", "pipeline_layers"):
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
        if encode.tensor_parallel != 1:
            limit = "1, because every rank would encode all images"
            raise ConfigError(f"{path}.encode.engine.tensor_parallel", encode.tensor_parallel, limit)
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
        options.setdefault("enable_lora", self.has_adapters)
        if role == "encode":  # not as in the other pools
            options["tensor_parallel"] = given(self.pools[role].engine).get("tensor_parallel", 1)
            options["pipeline_parallel"], options["pipeline_layers"], options["data_parallel"] = 1, None, 1
            options["enable_lora"] = options["enable_eplb"] = False
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
        return self.price_list().engine_hour * self.engine_config(role).data_parallel

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


class AppConfig(Section):
    """One application."""

    models: list[ModelSection] = Field(min_length=1)  #: models, each with its pools
    ingress: IngressSection = IngressSection()  #: the HTTP API
    log_format: LogFormat = "text"  #: `json` writes one object per line
    log_level: LogLevel = "info"  #: `debug` also logs each stage of every request
    tracing: TracingSection | None = None  # type: ignore[valid-type]  #: OpenTelemetry, which needs the extra `otel`

    @property
    def log(self) -> LogConfig:
        return LogConfig(format=self.log_format, level=self.log_level)

    def tracing_config(self) -> TracingConfig | None:
        return None if self.tracing is None else TracingConfig(**dict(self.tracing))

    def console_config(self) -> ConsoleConfig:
        """Return the configuration as the console shows it: every key with the value in force, without API keys and
        passwords."""
        above = self.model_dump(mode="json", exclude={"models": True, "ingress": {"api_keys"}})
        above["ingress"]["api_keys"] = f"{len(self.ingress.api_keys)} keys"
        shown = {"models": [model.shown() for model in self.models], **above}
        return ConsoleConfig(
            enabled=self.ingress.console,
            texts=self.ingress.console_texts,
            currency=self.ingress.currency,
            configuration=without_credentials(shown),
        )

    @classmethod
    def of(cls, application: dict[str, Any]) -> AppConfig:
        """Parse an application of a Serve configuration, including its autoscaling policy, which is outside `args`.
        Raises like `parse`."""
        config = cls.parse(application.get("args") or {})
        policy = (application.get("autoscaling_policy") or {}).get("policy_function")
        if config.autoscales and policy not in POLICIES:
            limit = f"{POLICY}, next to `args`, because a pool has max_replicas or roles change"
            raise ConfigError("autoscaling_policy.policy_function", policy, limit)
        return config

    @property
    def autoscales(self) -> bool:
        """Whether any pool is autoscaled."""
        return any(model.autoscales for model in self.models)

    @classmethod
    def parse(cls, args: dict[str, Any]) -> AppConfig:
        """Parse `args`. Raises ConfigError with the path of the key, and StartupError for a missing extra."""
        try:
            config = cls.model_validate(args)
        except pydantic.ValidationError as error:
            raise _first_problem(error) from None
        names: list[str] = []
        for i, model in enumerate(config.models):
            model.check(f"models[{i}]")
            for name in (model.name, *model.aliases, *(module.name for module in model.lora_modules)):
                if name in names:
                    raise ConfigError(f"models[{i}].name", name, "different from all other names")
                names.append(name)
        if (tracing := config.tracing_config()) is not None:
            tracing.check_installed()
        config.ingress.store_config()
        config.ingress.image_config()
        config.ingress.check_limits(config.models)
        return config


def _first_problem(error: pydantic.ValidationError) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    path = _path(problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            known = ", ".join(_known_keys(problem["loc"][:-1]))
            return ConfigError(path, problem["loc"][-1], f"one of the known keys ({known})")
        case "missing":
            return ConfigError(path, None, "given")
        case _:
            return ConfigError(path, problem["input"], expected(problem["msg"]))


def _path(location: tuple[int | str, ...]) -> str:
    """Return a location in the form models[0].engine.block_size."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section at `location`."""
    section: Any = AppConfig
    is_name = False  # of an entry of a mapping
    for part in location:
        if isinstance(part, str) and not is_name:
            annotation = section.model_fields[part].annotation
            is_name = get_origin(annotation) is dict
            section = next(iter(get_args(annotation)[is_name:]), annotation)
        else:
            is_name = False
    return list(section.model_fields)
