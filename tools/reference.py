"""`python tools/reference.py` prints docs/reference.md: what users fill in, as the code describes it."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig

ROOT = Path(__file__).parents[1]
HEAD = """# Reference

Made from the code by `python tools/reference.py`; a test compares them.

`serve_config.yaml` is Ray Serve's file. Manta reads the `args` of an application with `import_path:
manta:build` (`AppConfig`). `manta serve --help=all` lists the flags that set these keys.
"""
CLASSES = [  # heading, file, class
    ("args", "cluster/config/app_config.py", "AppConfig"),
    ("args.models[]", "cluster/config/model_section.py", "ModelSection"),
    ("lora_modules[] of a model", "cluster/config/model_section.py", "LoraModule"),
    ("lora of a model", "cluster/config/model_section.py", "LoraSection"),
    ("decode, prefill and encode of a model", "cluster/config/pool_section.py", "PoolSection"),
    ("prices of a model", "deployments/billing/prices.py", "Prices"),
    ("args.ingress", "cluster/config/ingress_section.py", "IngressSection"),
    ("args.ingress.key_limits{}", "deployments/quotas/limits.py", "KeyLimits"),
    ("budget_limits[] of key_limits", "deployments/quotas/limits.py", "BudgetLimit"),
    ("engine: EngineConfig", "engine/config.py", "EngineConfig"),
    ("engine.speculative_config", "engine/options/speculation.py", "SpeculativeConfig"),
    ("engine.kv_events_config", "engine/options/kv_events.py", "KVEventsConfig"),
    ("engine.structured_outputs_config", "engine/options/structured_outputs.py", "StructuredOutputsConfig"),
    ("engine.eplb_config", "engine/options/experts.py", "EPLBConfig"),
    ("handoff of a model", "engine/options/handoff.py", "HandoffConfig"),
    ("SamplingParams", "engine/wire/sampling_params.py", "SamplingParams"),
]
METHODS = ("__init__", "generate", "chat", "embed", "classify", "encode", "score", "close")


def reference() -> str:
    return "\n".join([HEAD, *(section(*row) for row in CLASSES), llm()])


def section(heading: str, path: str, name: str) -> str:
    source = (ROOT / path).read_text()
    found = list(fields(source, name))
    if name == EngineConfig.__name__:  # its fields are those of its bases
        for base in reversed(EngineConfig.__mro__[1:-1]):
            found += fields(Path(inspect.getfile(base)).read_text(), base.__name__)
    rows = [f"| `{key}` | `{default}` | {text} |" for key, default, text in found]
    note = ast.get_docstring(_class(source, name)) or ""
    return "\n".join([f"## {heading}\n", f"{note}\n", "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def llm() -> str:
    found = [
        f for f in _class((ROOT / "engine/offline/llm.py").read_text(), "LLM").body if isinstance(f, ast.FunctionDef)
    ]
    parts = [
        "## LLM\n",
        "`from manta import LLM`; the options of `LLM(model, **options)` are those of `EngineConfig`.\n",
    ]
    for function in (f for name in METHODS for f in found if f.name == name):
        call = f"LLM.{function.name}({ast.unparse(function.args)})".replace("LLM.__init__(self, ", "LLM(")
        text = re.sub(r"\s+", " ", ast.get_docstring(function) or "")
        parts.append(f"`{call.replace('(self, ', '(').replace('(self)', '()')}`\n{text}".rstrip() + "\n")
    return "\n".join(parts)


def fields(source: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and meaning of each field: of `option`'s help, a comment `#:`, or the text below it."""
    comments = {
        token.start[0]: token.string.partition("#:")[2].strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "#:" in token.string
    }
    body = _class(source, name).body
    for statement, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        default, text = _default(statement.value), comments.get(statement.end_lineno or 0, "")
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        if isinstance(statement.value, ast.Call):
            texts = [
                n.value for n in ast.walk(statement.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            text = next((t for t in reversed(texts) if " " in t and t != default), text)
        default = "set by Manta" if "Manta sets it" in text else default
        yield statement.target.id, default.replace("|", "\\|"), re.sub(r"\s+", " ", text).replace("|", "\\|")


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        found = given.get("default", value.args[0] if value.args else None)
        if "default_factory" in given:
            return {"dict": "{}", "list": "[]"}.get(ast.unparse(given["default_factory"]), "the defaults below")
        if found is None:
            return "the defaults below" if not given else "required"
        return ast.unparse(found)
    return "required" if value is None else ast.unparse(value)


def _class(source: str, name: str) -> ast.ClassDef:
    return next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)


if __name__ == "__main__":
    print(reference(), end="")
