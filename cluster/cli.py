"""The command `manta`."""

from __future__ import annotations

import logging
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.commands import bench
from engine.errors import RequestError, ServingError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Manta: serve and run large language models.")
app.add_typer(bench, name="bench")
k8s = typer.Typer(no_args_is_help=True, help="Manifests for Kubernetes (k8s/README.md).")
app.add_typer(k8s, name="k8s")

ModelOption = Annotated[str, typer.Option(help="`pocket` (bundled), a Hugging Face model folder, or a Hub id.")]


@app.callback()
def configure(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")] = False) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="As for `serve run`.")] = Path(
        "serve_config.yaml"
    ),
) -> None:
    """Say in one line what is wrong with a serve_config.yaml, before any cluster is started.

    Looks at every key, and at the model folders; exit code 1 if `serve run` would not get far.
    """
    from cluster.app import check as check_file  # ray takes seconds

    print(f"{config} is fine; models: {', '.join(check_file(config))}", file=sys.stderr)


@app.command()
def generate(
    input: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON lines; see below.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Answers; what is in it already is kept.")],
    model: ModelOption = "pocket",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; default: what the context holds.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to sample from; default 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="For lines that bring none.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + answer, in tokens.")] = None,
    kv_cache_memory_gib: Annotated[float | None, typer.Option(help="Size of the KV cache.")] = None,
) -> None:
    """Answer a file of prompts, offline; run it again after a kill, and it goes on where it was.

    A line of the input is a JSON object with a "prompt" (text, or a list of token ids) or with "messages" as in the
    chat API; beside it an "id" of your choice and any sampling parameter. Line k of the output answers line k of the
    input.

    Example of a line: {"messages": [{"role": "user", "content": "What is an ocean?"}], "temperature": 0}
    """
    from cluster.batch_inference import generate_file  # torch takes seconds; `manta --help` should not
    from engine.llm import LLM

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    defaults = {name: value for name, value in given.items() if value is not None}
    options: dict[str, Any] = {
        "dtype": dtype, "max_model_len": max_model_len, "kv_cache_memory_gib": kv_cache_memory_gib
    }  # fmt: skip
    summary = generate_file(lambda: LLM(model, **options), input, output, defaults, progress=sys.stderr.isatty())
    told = f"{summary.written} lines answered, {summary.failed} of them with an error"
    print(f"{told}; {summary.resumed} were there before" if summary.resumed else told, file=sys.stderr)
    raise typer.Exit(1 if summary.failed else 0)


@app.command(name="hash-key")
def print_key_line(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in logs, and the unit of fair sharing.")],
    generate: Annotated[bool, typer.Option(help="Make a new key, and show it once.")] = False,
) -> None:
    """Print the line for an API key that goes into `ingress.api_keys_file`; the key itself is stored nowhere.

    Example: manta hash-key alice --generate >> keys
    """
    from deployments.api_keys import LINE, hash_key

    key = f"sk-{secrets.token_urlsafe(32)}" if generate else typer.prompt("API key", hide_input=True, err=True)
    line = f"{name}:{hash_key(key)}"
    if LINE.fullmatch(line) is None:
        raise RequestError(f"name must be without spaces and colons, got {name!r}")
    if generate:
        print(f"the key of {name}, shown only now: {key}", file=sys.stderr)
    print(line)


@k8s.command(name="lint")
def lint_manifests(
    path: Annotated[Path, typer.Argument(exists=True, help="A folder for kustomize, or a YAML file.")],
) -> None:
    """Say what is wrong with manifests that Kubernetes would accept; exit code 1 if anything is.

    Holds the Serve configuration in a RayService against its pods: whether replicas fit, whether ports, labels and
    deadlines agree, who may reach which port, and what pods are allowed to do.

    Example: manta k8s lint k8s/overlays/single-gpu
    """
    from cluster.k8s_lint.lint import lint  # ray takes seconds

    found = lint(path)
    for finding in found:
        print(finding)
    if found:
        raise typer.Exit(1)
    print(f"{path} is fine", file=sys.stderr)


def main() -> None:
    """Exit code 1 and one line for an error that the user can mend."""
    try:
        app()
    except ServingError as error:
        print(f"manta: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
