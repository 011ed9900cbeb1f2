"""Options of the HTTP API."""

from __future__ import annotations

from dataclasses import fields

from pydantic import Field

from cluster.config.model_section import ModelSection
from cluster.config.section import Section, section_of
from deployments.http.middleware import AuthConfig
from deployments.http.validation import UnknownFields
from deployments.openai.batches.config import BatchConfig
from deployments.options.images import ImageConfig
from deployments.quotas.limits import KeyLimits
from deployments.storage.config import StoreConfig
from engine.errors import ConfigError, Described

ImageSection = section_of(ImageConfig, without=set())


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
    """Show prompts and outputs of requests on the console's page and in `manta explain`: all to admins, and to each key
    those of its own requests."""
    root_path: str = Field(default="", pattern=r"^(/[^/\s]+)*$")  #: prefix of all paths at a proxy in front: `/llm`
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)  #: limit for a request's body that is not a file
    max_upload_bytes: int = Field(default=200 * 2**20, ge=1024)  #: limit for a file; body_timeout_s grows in proportion
    body_timeout_s: float = Field(default=60.0, gt=0)  #: time for a request's body to arrive; else 408
    admin_keys: list[str] = Field(default=[])
    """Names of the keys of admins, who may do what others may not (docs/security.md, "Routes"). Without keys, everybody
    may."""
    allow_runtime_key_updating: bool = False  #: admin_keys may make API keys and change limits (docs/quotas.md)
    allow_runtime_lora_updating: bool = False  #: requests may load and unload LoRA adapters (docs/lora.md)
    allowed_origins: list[str] = Field(default=[])  #: origins of web pages that may send requests; `*` for all
    allowed_hosts: list[str] = Field(default=[])
    """Names by which clients may call a server without keys that listens on loopback, besides localhost, 127.0.0.1 and
    ::1; `*` for all."""
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
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")  #: of the models' `prices`, for the console
    batch_max_in_flight: int = Field(default=16, ge=1)  #: requests of a batch at a time, if no other requests wait

    def auth(self) -> AuthConfig:
        """Return the limits of the HTTP edge. Raises ConfigError for invalid keys, and for admins without a key."""
        same = {
            field.name: getattr(self, field.name)
            for field in fields(AuthConfig)
            if field.name in type(self).model_fields
        }
        auth = AuthConfig(**same, num_ingresses=self.num_replicas)
        keys = auth.keys()
        if keys is not None and not self.allow_runtime_key_updating:  # with it, the store has keys of other names
            for name in self.admin_keys:
                if not keys.has_name(name):
                    limit = "names of keys in ingress.api_keys_file or ingress.api_keys"
                    raise ConfigError("ingress.admin_keys", name, limit)
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

    def batches(self) -> BatchConfig:
        return BatchConfig(folder=self.batch_dir, max_in_flight=self.batch_max_in_flight)
