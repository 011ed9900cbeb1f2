"""Translates arguments of `vllm serve` to those of `manta serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError, InvalidParameter, RequestError
from engine.offline.vllm_flags import ALL2ALL, NAMES, NOT_READ, VALUES, FlagRow, draft_options, find, takes

SEVERAL = ("--served-model-name", "--api-key", "--lora-modules")  # flags that take several values in vLLM
OBJECTS = (  # our flags whose value is a JSON object, which may come in parts: --hf-overrides.rope_theta 1e6
    "--speculative-config", "--hf-overrides", "--override-generation-config", "--default-chat-template-kwargs",
    "--limit-mm-per-prompt", "--kv-events-config", "--eplb-config", "--structured-outputs-config",
)  # fmt: skip
SIZES = ("--max-model-len", "--max-num-batched-tokens", "--max-num-queued-tokens", "--kv-cache-memory-bytes")


@dataclass(slots=True)
class Command:
    """A translated command."""

    args: list[str] = field(default_factory=list)
    """Our flags, and words that are not flags."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Flags that were left out, each with the reason why this is harmless."""
    refused: dict[str, str] = field(default_factory=dict)
    """Flags that are not supported, each with its alternative."""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of flags in OBJECTS."""
    seen: dict[str, str | None] = field(default_factory=dict)
    """All flags of vLLM in the command, by vLLM's name."""

    @property
    def warning(self) -> str:
        """One line about the flags that were left out; empty if there are none."""
        reasons: dict[str, list[str]] = {}
        for flag, why in self.ignored.items():
            reasons.setdefault(why, []).append(flag)
        left_out = "; ".join(f"{' '.join(flags)} ({why})" for why, flags in reasons.items())
        return left_out and f"ignored: {left_out}"


def translated(args: list[str]) -> Command:
    """Return the translation of `vllm serve` arguments, without `vllm serve` itself. Our own flags are kept.

    Raises RequestError for unsupported flags that would change results or capacity; the message names each of them,
    with the alternative.
    """
    command, rest = Command(), _repeated(_with_file(args))
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word.lstrip("-")[:1].isdigit() or word in ("-", "--"):
            command.args.append(word)
            continue
        name, equals, value = word.partition("=")
        _take(command, _dashed(name), value if equals else None, rest)
    if command.refused:
        raise RequestError("; ".join(f"{name} is not supported: {note}" for name, note in command.refused.items()))
    _share_experts(command)
    for flag, content in command.objects.items():
        _add_object(command, flag, content)
    return command


def arguments(engine_kwargs: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM's engine, such as `engine_kwargs` of Ray Serve LLM, as flags of `vllm serve`."""
    args = []
    for key, value in engine_kwargs.items():
        flag = _flag(key)
        match value:
            case None:
                continue
            case bool():
                args.append(flag if value else flag.replace("--", "--no-", 1))
            case list() | tuple() if flag in SEVERAL:
                args += [f"{flag}={json.dumps(item) if isinstance(item, dict) else item}" for item in value]
            case dict() | list() | tuple():
                args.append(f"{flag}={json.dumps(value)}")
            case _:
                args.append(f"{flag}={value}")
    return args


def _take(command: Command, name: str, value: str | None, rest: list[str]) -> None:
    """Add a flag to a command with its value, which may be the next word of `rest`."""
    base, _, path = name.partition(".")
    if re.fullmatch(r"-O\d", base):
        base, value = "-O", base[2:]
    if base.startswith("--no-") and _switch(base) in NAMES:
        _take_negated(command, base)
        return
    if base not in NAMES and base not in OBJECTS:
        command.args.append(name if value is None else f"{name}={value}")
        if base in VALUES or base in SIZES:
            _translate_value(command, base, value, rest)
        return
    several = base in NAMES and takes(base) == "*"
    if value is None and (base in OBJECTS or path or takes(base)):
        value = _next(rest, several)
    elif value is not None and several and not value.startswith("["):
        value = json.dumps([value])
    value = value and _number(base, value)
    command.seen[base] = value
    row = find(base, value)
    if base in OBJECTS and (row is None or row.effect == "other name"):
        _merge(command, base, path, value)
    elif row is None or row.effect == "refused":
        assert row is not None, base
        command.refused[name] = row.note
    elif row.effect == "ignored":
        command.ignored[name] = row.note
    else:
        _rename(command, row, value, rest)


def _take_negated(command: Command, name: str) -> None:
    """Leave out a switch that asks for the default, or negate a switch that has another name in Manta."""
    row = find(_switch(name))
    assert row is not None
    if row.effect == "other name":
        command.args.append(row.note.replace("--", "--no-", 1))
    else:
        command.ignored[name] = row.note


def _rename(command: Command, row: FlagRow, value: str | None, rest: list[str]) -> None:
    """Add our equivalent of a flag: a flag with another name, a key of an object, or a key of the configuration."""
    if row.note.endswith("={}"):
        command.args += ["--set", row.note.format(value)]
    elif "." in row.note:
        flag, _, path = row.note.partition(".")
        _merge(command, flag, path, value)
    else:
        _take(command, row.note, value, rest)


def _translate_value(command: Command, flag: str, value: str | None, rest: list[str]) -> None:
    """Translate the value of a flag in VALUES, the command's newest word; without an equivalent, drop the flag."""
    command.args.pop()
    value = rest.pop(0) if value is None and rest else value
    ours = VALUES.get(flag, {}).get(value or "", value and _number(flag, value))
    if ours is not None:
        command.args += [flag, ours]
    elif value is None:
        command.args.append(flag)


def _number(flag: str, text: str) -> str:
    """Return the value of a flag in SIZES without its unit: 8k is 8000 and 8K is 8192, up to T. Raises
    InvalidParameter for a fraction of a binary unit, as in 1.5G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])", text.strip(), re.IGNORECASE)
    if flag not in SIZES or match is None:
        return text
    number, unit = match.groups()
    if unit.isupper() and "." in number:
        raise InvalidParameter(flag, text, f"a whole number, or written {number}{unit.lower()} for powers of 1000")
    return str(int(float(number) * (1000 if unit.islower() else 1024) ** (1 + "kmgt".index(unit.lower()))))


def _merge(command: Command, flag: str, path: str, value: str | None) -> None:
    """Set the value, or a key at a path inside the value, of a flag in OBJECTS. Raises InvalidParameter for a value
    that is not an object."""
    try:
        found = json.loads(value or "")
    except ValueError:
        found = value
    target = command.objects.setdefault(flag, {})
    *parents, key = path.split(".") if path else [""]
    for parent in parents:
        target = target.setdefault(parent, {})
    if key:
        target[key] = found
    elif isinstance(found, dict):
        target |= found
    else:
        raise InvalidParameter(flag, value, "JSON, an object")


def _add_object(command: Command, flag: str, content: dict[str, Any]) -> None:
    """Add a flag in OBJECTS with its collected content."""
    if flag == "--limit-mm-per-prompt":
        _add_images(command, content)
        return
    if flag == "--speculative-config":
        content, left_out = draft_options(content)
        command.ignored |= {f"{flag}.{key}": why for key, why in left_out.items()}
    for key, why in NOT_READ.get(flag, {}).items():
        if content.pop(key, None) is not None:
            command.ignored[f"{flag}.{key}"] = why
    command.args += [flag, json.dumps(content)]


def _add_images(command: Command, limits: dict[str, Any]) -> None:
    """Add the flag for the limit on images. limits: limits per prompt by kind of media; other kinds are ignored."""
    images = limits.get("image")
    images = images.get("count") if isinstance(images, dict) else images
    if images == 0:
        command.args.append("--language-model-only")
    elif images is not None:
        command.args += ["--set", f"ingress.images.max_per_request={images}"]
    for kind in sorted(limits.keys() - {"image"}):
        command.ignored[f"--limit-mm-per-prompt.{kind}"] = "models take text and images"


def _share_experts(command: Command) -> None:
    """Let the engines of --data-parallel-size share the experts of one replica if vLLM would distribute experts over
    them. Otherwise they are independent replicas, and no tokens travel between them."""
    size = next((command.seen[name] for name in ("--data-parallel-size", "-dp") if name in command.seen), None)
    shares = size is not None and not {"--enable-expert-parallel", "-ep"}.isdisjoint(command.args)
    if shares:
        command.args[command.args.index(f"--num-replicas={size}")] = f"--data-parallel-size={size}"
    if (not shares or size == "1") and ALL2ALL in command.args:
        at = command.args.index(ALL2ALL)
        del command.args[at : at + 2]
        command.ignored[ALL2ALL] = "tokens travel only between engines that share experts"


def _with_file(args: list[str]) -> list[str]:
    """Return the arguments without `--config FILE` and `--model`. The flags of the file come first, so the arguments
    override them. Raises ConfigError."""
    found: list[str] = []
    rest, before = list(args), []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--model":
            found.insert(0, value if equals else _next(rest) or "")
        elif name == "--config":
            before = _flags_of_file(Path(value if equals else _next(rest) or ""), args)
        else:
            found.append(word)
    return found[:1] + before + found[1:] if found and not found[0].startswith("-") else before + found


def _flags_of_file(file: Path, args: list[str]) -> list[str]:
    """Return the flags in a YAML file of vLLM, except those that `args` overrides."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("--config", str(file), f"a YAML file that can be read ({type(error).__name__})") from None
    if not isinstance(content, dict) or "applications" in content:
        limit = "flags of `vllm serve` in YAML; pass a Serve configuration as MODEL instead: manta serve FILE.yaml"
        raise ConfigError("--config", str(file), limit)
    given = {_dashed(word.partition("=")[0]) for word in args}
    kept = {key: value for key, value in content.items() if f"--{str(key).replace('_', '-')}" not in given}
    model = kept.pop("model", None)
    return [*([str(model)] if model is not None else []), *arguments(kept)]


def _next(rest: list[str], several: bool = False) -> str | None:
    """Take the value of a flag from the words after it."""
    if several:
        taken = [rest.pop(0) for _ in iter(lambda: bool(rest) and not rest[0].startswith("--"), False)]
        return json.dumps(taken)
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def _dashed(name: str) -> str:
    """Return a flag with dashes in place of underscores, except in the keys of an object after it."""
    base, dot, path = name.partition(".")
    return base.replace("_", "-") + dot + path


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _switch(name: str) -> str:
    return name.replace("--no-", "--", 1)


def _repeated(args: list[str]) -> list[str]:
    """If the model precedes all flags, as in vLLM's examples, repeat a flag in SEVERAL before each of its values.
    Otherwise a second value might be the model, so nothing is changed."""
    if not args or args[0].startswith("-"):
        return args
    result: list[str] = []
    flag = ""
    for arg in args:
        if arg.startswith("-"):
            flag = arg
        elif flag in SEVERAL and result[-1] != flag:
            result.append(flag)
        result.append(arg)
    return result
