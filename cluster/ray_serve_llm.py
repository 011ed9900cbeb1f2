"""Converts files of Ray Serve LLM: `args` of its builders to `args` of ours (docs/ray_serve_llm.md).

Keys that describe a model, its engine or its replicas are translated. A key without a counterpart is an error if it
would change answers or capacity; otherwise it is left out with a log line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.autoscaling.slo import POLICY
from cluster.entry_point import BUILDER
from cluster.serve_flags import ABOVE_MODELS, keys_of, model_args
from cluster.vllm.command import arguments, translated
from engine.bucket_url import SCHEMES, is_bucket
from engine.errors import ConfigError, Described, RequestError, StartupError

logger = logging.getLogger(__name__)

Keys = dict[str, Any]
LLMConfig = dict  # for Python code that creates one; its keys are the arguments
NAMES = ("build_openai_app", "build_pd_openai_app")  # names of the builders in Ray Serve LLM
BUILDERS = tuple(f"{module}:{name}" for module in ("manta", f"{__package__}.app") for name in NAMES)
OUR_PATHS = f"{BUILDER}, or with Ray Serve LLM's arguments {' or '.join(f'manta:{name}' for name in NAMES)}"
MODEL = (
    "model_loading_config", "llm_engine", "engine_kwargs", "accelerator_type", "accelerator_config",
    "placement_group_config", "deployment_config", "lora_config", "runtime_env", "server_cls", "experimental_configs",
    "log_engine_metrics", "callback_config",
)  # fmt: skip
AUTOSCALING = ("min_replicas", "max_replicas", "upscale_delay_s", "downscale_delay_s")  # the same in our pools
TO_ZERO = {"downscale_to_zero_delay_s": "scale_to_zero_delay_s"}
DEPLOYMENT = {"num_replicas": "num_replicas", "max_ongoing_requests": "max_ongoing_requests",
              "graceful_shutdown_timeout_s": "drain_s"}  # fmt: skip
LEFT_OUT = {  # sections of keys that are left out, and why that does no harm
    "autoscaling_config": "replicas follow `slo`",
    "deployment_config": "each deployment has its own options",
    "experimental_configs": "every token is sent when it is generated",
    "ingress_deployment_config": "each deployment has its own options",
}
HARMLESS_VARIABLES = ("VLLM_", "RAY_SERVE_LLM_")  # prefixes of variables that only affect another engine


def application(given: dict[str, Any]) -> dict[str, Any]:
    """Return an application of a Serve configuration, converted to Manta's if it names a builder of Ray Serve LLM.
    Raises StartupError."""
    if given.get("import_path") not in BUILDERS:
        return given
    args = given.get("args") or {}
    variables: dict[str, str] = {}
    ours = {**given, "import_path": BUILDER, "args": serving_args(args, variables)}
    ours.setdefault("autoscaling_policy", {"policy_function": POLICY})
    if variables:
        environment = given.get("runtime_env") or {}
        ours["runtime_env"] = {**environment, "env_vars": variables | (environment.get("env_vars") or {})}
    return ours


def serving_args(args: Mapping[str, Any], variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Convert `args` of `build_openai_app` (llm_configs) or `build_pd_openai_app` to ours. `args` may also contain our
    own keys at the level of `models`.

    variables: dict to which the models' environment variables are added. Without it, they must already be set, by the
    application's runtime_env or in the environment of `ray start`. Raises StartupError.
    """
    _check_keys(args, ("llm_configs", "prefill_config", "decode_config", "ingress_cls_config",
                       "ingress_deployment_config", *ABOVE_MODELS), "")  # fmt: skip
    _refuse(args, "ingress_cls_config", "", "Manta has only one ingress deployment")
    result: dict[str, Any] = {"models": [], **{key: dict(args[key]) if isinstance(args[key], dict) else args[key]
                                               for key in ABOVE_MODELS if key in args}}  # fmt: skip
    found: list[dict[str, Any]] = []
    if "decode_config" in args or "prefill_config" in args:
        found.append(_with_prefill(args, variables))
    for i, config in enumerate(args.get("llm_configs") or []):
        found.append(_model(config, f"llm_configs[{i}]", variables))
    if not found:
        raise ConfigError("llm_configs", args.get("llm_configs"), "a list of models")
    for model in found:
        result["models"] += model.pop("models")
        for key, value in model.items():  # options of the ingress in a model's configuration
            result[key] = {**value, **result.get(key, {})} if isinstance(value, dict) else value
    ingress = _pool(args.get("ingress_deployment_config") or {}, "ingress_deployment_config")
    if replicas := ingress.get("num_replicas", ingress.get("max_replicas")):
        result["ingress"] = {"num_replicas": replicas, **result.get("ingress", {})}
    return result


def _with_prefill(args: Mapping[str, Any], variables: dict[str, str] | None) -> dict[str, Any]:
    """Return the `args` of a model with two pools."""
    result = _model(args.get("decode_config"), "decode_config", variables)
    (decode,) = result["models"]
    (prefill,) = _model(args.get("prefill_config"), "prefill_config", variables)["models"]
    for key in ("name", "model"):
        if prefill[key] != decode[key]:
            raise ConfigError(f"prefill_config ({key})", prefill[key], f"the same as in decode_config ({decode[key]})")
    pool = prefill["decode"]
    decode["decode"] = {**decode["decode"], "engine": decode.pop("engine", {})}
    decode["prefill"] = {**pool, "engine": prefill.get("engine", {})}
    return result


def _model(given: Any, path: str, variables: dict[str, str] | None) -> dict[str, Any]:
    """Return `args` with one model for an LLMConfig, or for the file that contains it."""
    config = _config(given, path)
    _check_keys(config, MODEL, f"{path}.")
    if config.get("llm_engine", "vLLM") != "vLLM":
        raise ConfigError(f"{path}.llm_engine", config["llm_engine"], "vLLM, or left out: Manta uses its own engine")
    _refuse(config, "server_cls", path, "Manta uses its own engine")
    _refuse(config, "callback_config", path, "engines run no code of users")
    if "log_engine_metrics" in config:
        logger.warning("left out: log_engine_metrics of %s (/metrics always has the engines' metrics)", path)
    name, model, keys = _loading(config.get("model_loading_config"), f"{path}.model_loading_config")
    keys |= {f"decode.{key}": value for key, value in _hardware(config, path).items()}
    keys |= {
        f"decode.{key}": value
        for key, value in _pool(config.get("deployment_config") or {}, f"{path}.deployment_config").items()
    }
    experimental = config.get("experimental_configs") or {}
    if "num_ingress_replicas" in experimental:
        keys["ingress.num_replicas"] = experimental["num_ingress_replicas"]
    _leave_out(experimental, ("num_ingress_replicas",), f"{path}.experimental_configs", "experimental_configs")
    kwargs = dict(config.get("engine_kwargs") or {})
    environment = dict(config.get("runtime_env") or {})
    if token := kwargs.pop("hf_token", None):
        environment["env_vars"] = {"HF_TOKEN": token, **(environment.get("env_vars") or {})}
    _environment(environment, f"{path}.runtime_env", variables)
    keys |= _lora(config.get("lora_config") or {}, f"{path}.lora_config", kwargs)
    engine = engine_keys(kwargs, f"{path}.engine_kwargs")
    tokenizer = keys.pop("engine", {})
    if engine.get("engine") or tokenizer:
        engine["engine"] = {**tokenizer, **engine.get("engine", {})}
    return model_args(model, keys | engine | {"name": name})


def _config(given: Any, path: str) -> dict[str, Any]:
    """Return an LLMConfig, reading it if it is a YAML file."""
    if isinstance(given, str):
        try:
            given = yaml.safe_load(Path(given).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(path, given, f"a YAML file that can be read ({type(error).__name__})") from None
    elif hasattr(given, "model_dump"):  # an LLMConfig of Python code
        given = given.model_dump(mode="json", exclude_unset=True)
    if not isinstance(given, dict):
        raise ConfigError(path, given, "an LLMConfig: a section with keys, or the name of its file")
    return given


def _loading(given: Any, path: str) -> tuple[str, str, Keys]:
    """Return a model's name, its folder or Hub id, and further keys of its section."""
    given = given if isinstance(given, dict) else {}
    _check_keys(given, ("model_id", "model_source", "tokenizer_source"), f"{path}.")
    if not isinstance(given.get("model_id"), str):
        raise ConfigError(
            f"{path}.model_id", given.get("model_id"), "given; it is the name that clients send as `model`"
        )
    source = given.get("model_source") or given["model_id"]
    if not isinstance(source, str) or "://" in source:
        limit = "a folder or a Hub id: mount the bucket, or copy it to a folder that all nodes have"
        raise ConfigError(f"{path}.model_source", Described(f"{source}"), limit)
    tokenizer = given.get("tokenizer_source")
    return given["model_id"], source, {} if tokenizer is None else {"engine": {"tokenizer": tokenizer}}


def _lora(given: Mapping[str, Any], path: str, kwargs: Keys) -> Keys:
    """Return the source of adapters, as keys of a model's section, and add to `kwargs` the number of adapters per
    engine. Adapters' names have the form `model:adapter`, which requests may always use."""
    known = ("dynamic_lora_loading_path", "max_num_adapters_per_replica", "download_timeout_s", "max_download_tries")
    _check_keys(given, known, f"{path}.")
    if (count := given.get("max_num_adapters_per_replica")) is not None:
        slots = kwargs.setdefault("max_loras", count)
        kwargs.setdefault("max_cpu_loras", max(count, slots))
    folder = given.get("dynamic_lora_loading_path")
    if folder is not None and "://" in folder and not is_bucket(folder):
        limit = f"a folder that all nodes have, or the URL of a folder in a bucket ({', '.join(SCHEMES)})"
        raise ConfigError(f"{path}.dynamic_lora_loading_path", folder, limit)
    return {} if folder is None else {"lora.dynamic_folder": folder}


def _hardware(config: Mapping[str, Any], path: str) -> Keys:
    """Return the hardware of each rank as keys of a pool: one GPU, unless the configuration says CPU."""
    group = config.get("placement_group_config") or {}
    _check_keys(group, ("bundle_per_worker", "bundles", "strategy"), f"{path}.placement_group_config.")
    kind = (config.get("accelerator_config") or {}).get("kind")
    bundles = group.get("bundles") or [group.get("bundle_per_worker") or {"GPU": int(kind != "cpu")}]
    if kind not in (None, "gpu", "cpu"):
        raise ConfigError(f"{path}.accelerator_config.kind", kind, "gpu or cpu")
    if any(bundle != bundles[0] for bundle in bundles) or not bundles[0].keys() <= {"CPU", "GPU"}:
        limit = "CPUs and GPUs, the same in each bundle, because a bundle is a rank"
        raise ConfigError(f"{path}.placement_group_config.bundles", bundles, limit)
    pool = {
        "num_gpus": bundles[0].get("GPU", 0),
        "num_cpus": bundles[0].get("CPU"),
        "placement_strategy": group.get("strategy"),
        "accelerator_type": config.get("accelerator_type"),
    }
    return {key: value for key, value in pool.items() if value is not None}


def _pool(given: Mapping[str, Any], path: str) -> Keys:
    """Return the keys of a pool for the options of a Serve deployment."""
    scaling = dict(given.get("autoscaling_config") or {})
    pool = {ours: given[key] for key, ours in DEPLOYMENT.items() if key in given}
    if pool.get("num_replicas") == "auto":  # apply Serve's defaults for "auto"
        del pool["num_replicas"]
        scaling = {"min_replicas": 1, "max_replicas": 100, **scaling}
    if scaling:
        low, high = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
        pool |= {key: scaling[key] for key in AUTOSCALING if key in scaling}
        pool |= {ours: scaling[key] for key, ours in TO_ZERO.items() if key in scaling}
        if low == high:  # a fixed number
            pool = {key: value for key, value in pool.items() if key not in ("min_replicas", "max_replicas")}
            pool["num_replicas"] = low
        else:
            pool["max_replicas"] = high
            _leave_out(scaling, (*AUTOSCALING, *TO_ZERO), f"{path}.autoscaling_config", "autoscaling_config")
    _leave_out(given, (*DEPLOYMENT, "autoscaling_config"), path, path.rpartition(".")[2])
    return pool


def engine_keys(kwargs: Mapping[str, Any], path: str) -> Keys:
    """Return our keys for arguments of vLLM's engine. Raises StartupError for one that has no counterpart."""
    given = dict(kwargs)
    if given.pop("kv_transfer_config", None) is not None:
        logger.warning("left out: kv_transfer_config of %s (pools of prefill and decode find each other)", path)
    try:
        command = translated(arguments(given))
        keys = keys_of(command.args)
    except RequestError as error:
        raise StartupError(f"{path}: {error}") from None
    if command.warning:
        logger.warning("%s: %s", path, command.warning)
    return {key: value for key, value in keys.items() if key not in ("name", "aliases")}


def _environment(given: Mapping[str, Any], path: str, variables: dict[str, str] | None) -> None:
    """Collect a model's environment variables. Raises ConfigError for other keys of a runtime environment, and for
    variables that would not be set."""
    _check_keys(given, ("env_vars",), f"{path}.")
    needed = {
        name: value for name, value in (given.get("env_vars") or {}).items() if not name.startswith(HARMLESS_VARIABLES)
    }
    if variables is not None:
        variables |= needed
        return
    for name, value in needed.items():
        if os.environ.get(name) != value:
            limit = "set by runtime_env of the application, next to `args`, or in the environment of `ray start`"
            raise ConfigError(f"{path}.env_vars.{name}", Described("a value"), limit)


def _leave_out(given: Mapping[str, Any], known: tuple[str, ...], path: str, section: str) -> None:
    """Log which keys of a section are left out."""
    if others := [key for key in given if key not in known]:
        logger.warning("left out: %s of %s (%s)", ", ".join(others), path, LEFT_OUT[section])


def _refuse(given: Mapping[str, Any], key: str, path: str, why: str) -> None:
    if given.get(key):
        raise ConfigError(f"{path}.{key}".lstrip("."), given[key], f"left out: {why}")


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{path}{key}", key, f"one of the known keys ({', '.join(known)})")
