"""Reads the modules that turn hidden states into an embedding or a score, from files that sentence-transformers writes.

https://sbert.net/docs/package_reference/sentence_transformer/modules.html describes the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.errors import ModelFolderError
from engine.json_file import read_json as read_any
from engine.model.checkpoint.fields import Fields, Unsupported, reading
from engine.model.checkpoint.folder import read_json

PoolingType = Literal["cls", "last", "mean"]
Activation = Literal["Identity", "Sigmoid", "Softmax"]
MODES: dict[str, PoolingType] = {"cls": "cls", "lasttoken": "last", "mean": "mean"}  # sentence-transformers' names
# the same modes as written by versions before 6
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
ACTIVATIONS = ("Identity", "Tanh")
SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A linear layer after pooling."""

    path: str
    """Its folder, relative to the model's."""
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How one model pools. The defaults are vLLM's for a generative model whose folder names no modules."""

    type: PoolingType = "last"
    """What is pooled: the first token's hidden state, the last token's, or the mean of all."""
    normalize: bool = True
    """Whether embeddings are scaled to length 1."""
    dense: tuple[DenseConfig, ...] = ()
    max_seq_length: int | None = None
    """Longest text, if it is shorter than the model's own context."""
    is_embedding: bool = False
    """Whether the folder names modules that make an embedding."""
    score_token_ids: tuple[int, int] | None = None
    """Tokens by which a generative reranker says yes and no."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a model with a score head; empty for another."""
    activation: Activation = "Sigmoid"
    """What scores and the numbers of classes pass through."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Sizes that embeddings may be truncated to; empty for any."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Prompts by name: texts to put in front of the text to embed."""
    default_prompt_name: str | None = None

    @classmethod
    def from_folder(cls, folder: Path, default: PoolingType, classifies: bool) -> PoolingConfig:
        """Read a model's modules. default: type of pooling if the folder names none. classifies: whether the model has
        a score head. Raises ModelFolderError."""
        raw = Fields(read_json(folder, "config.json"))
        labels = _labels(raw) if classifies else ()
        fields: dict[str, Any] = {
            "type": default,
            "labels": labels,
            "activation": _activation(raw, folder, len(labels)),
            "matryoshka_dimensions": tuple(raw.get("matryoshka_dimensions") or ()),
            **_prompts(folder),
        }
        if (folder / "modules.json").is_file():
            fields["normalize"] = False
            for module in _modules(folder):
                _read_module(folder, module, fields)
        return cls(**fields)


def _modules(folder: Path) -> list[Fields]:
    modules = read_any(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFolderError(str(folder), "modules.json is not a list of modules")
    with reading(folder, "modules.json"):
        return sorted(map(Fields, modules), key=lambda module: module["idx"])


def _read_module(folder: Path, module: Fields, fields: dict[str, Any]) -> None:
    with reading(folder, "modules.json"):
        path, kind = module.get("path", ""), (module.get("type") or "").rpartition(".")[2]
        if path != "" and (Path(path).name != path or path == ".." or len(path) > 100):
            raise Unsupported("path", path, "the name of a folder in the model's folder")
    match kind:
        case "Transformer":
            if (folder / path / "sentence_bert_config.json").is_file():
                with reading(folder, f"{path}/sentence_bert_config.json".lstrip("/")):
                    config = Fields(read_json(folder / path, "sentence_bert_config.json"))
                    fields["max_seq_length"] = config.get("max_seq_length")
        case "Pooling":
            fields |= {"type": _pooling_type(folder, path), "is_embedding": True}
        case "Dense" if not fields["normalize"]:
            fields["dense"] = (*fields.get("dense", ()), _dense(folder, path))
        case "Normalize":
            fields["normalize"] = True
        case "LogitScore":
            with reading(folder, f"{path}/config.json"):
                config = Fields(read_json(folder / path, "config.json"))
                if config["false_token_id"] is None:
                    raise Unsupported("false_token_id", None)
                fields["score_token_ids"] = (config["true_token_id"], config["false_token_id"])
        case _:
            problem = f"modules.json: {module.get('type')!r} is not supported at this place"
            raise ModelFolderError(str(folder), problem)


def _pooling_type(folder: Path, path: str) -> PoolingType:
    with reading(folder, f"{path}/config.json"):
        config = Fields(read_json(folder / path, "config.json"))
        modes = config.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if config.get(flag)]
        modes = [modes] if isinstance(modes, str) else modes
        if len(modes) != 1 or modes[0] not in MODES:
            raise Unsupported("pooling mode", modes)
        if not config.get("include_prompt", True):
            raise Unsupported("include_prompt", False)
        return MODES[modes[0]]


def _dense(folder: Path, path: str) -> DenseConfig:
    with reading(folder, f"{path}/config.json"):
        config = Fields(read_json(folder / path, "config.json"))
        activation = config.get("activation_function", "Tanh").rpartition(".")[2]
        if activation not in ACTIVATIONS:
            raise Unsupported("activation_function", activation)
        for key, value in (("use_residual", False), ("module_input_name", "sentence_embedding")):
            if config.get(key, value) != value:
                raise Unsupported(key, config[key])
        return DenseConfig(
            path=path,
            inputs=config["in_features"],
            outputs=config["out_features"],
            bias=config.get("bias", True),
            activation=activation,
        )


def _prompts(folder: Path) -> dict[str, Any]:
    """Return the fields of PoolingConfig for prompts, which are put in front of texts."""
    if not (folder / SENTENCE_TRANSFORMERS).is_file():
        return {}
    with reading(folder, SENTENCE_TRANSFORMERS):
        config = Fields(read_json(folder, SENTENCE_TRANSFORMERS))
        prompts, default = dict(config.get("prompts") or {}), config.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise ModelFolderError(str(folder), f"{SENTENCE_TRANSFORMERS}: prompts is not an object of texts")
    if default is not None and default not in prompts:
        problem = f"{SENTENCE_TRANSFORMERS}: default_prompt_name {default!r} is not among its prompts"
        raise ModelFolderError(str(folder), problem)
    return {"prompts": prompts, "default_prompt_name": default}


def _labels(raw: Fields) -> tuple[str, ...]:
    """Return the names of classes, by transformers' defaults where config.json has none."""
    named = raw.get("id2label") or {}
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(len(named) or raw.get("num_labels", 2)))


def _activation(raw: Fields, folder: Path, num_labels: int) -> Activation:
    """Return what scores pass through: what sentence-transformers' files name; if they name nothing, its default for
    one label, a sigmoid, and for several labels what transformers' pipelines do."""
    named = (raw.get("sentence_transformers") or {}).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function") or ""
    if not named and (folder / SENTENCE_TRANSFORMERS).is_file():
        with reading(folder, SENTENCE_TRANSFORMERS):
            named = Fields(read_json(folder, SENTENCE_TRANSFORMERS)).get("activation_fn") or ""
    if not named:
        kinds: dict[str | None, Activation] = {"regression": "Identity", "multi_label_classification": "Sigmoid"}
        return kinds.get(raw.get("problem_type"), "Softmax") if num_labels > 1 else "Sigmoid"
    kind = named.rpartition(".")[2]
    if kind not in get_args(Activation):
        raise ModelFolderError(str(folder), f"activation_fn {named} of a score is not supported")
    return cast(Activation, kind)
