"""Links, commands and configurations of the pages name what is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer
import yaml

from cluster.cli.main import app
from cluster.config.app_config import AppConfig
from deployments.http.route import Audience
from tests.docs.pages import PAGES, blocks, commands, named_commands
from tools import routes
from tools.reference import reference
from tools.site import FENCE, ROOT, links

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
MANTA = typer.main.get_command(app)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def test_every_page_in_docs_is_led_to_from_the_readme():
    assert {*ROOT.glob("docs/**/*.md")} <= {*PAGES}


@every_page
def test_links_of_a_page_lead_to_files_and_headings(page):
    for target, file, anchor in links(page):
        if file is None:
            continue
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


@every_page
def test_commands_of_manta_on_a_page_have_flags_that_there_are(page):
    for words in named_commands(page):
        if Path(words[0]).name != "manta":
            continue
        command = MANTA
        rest = words[1:]
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        # of `vllm serve`, JSON keys of an object, and those that only an example leaves out
        given = {word.partition("=")[0].partition(".")[0] for word in rest if word.startswith("--")}
        if command.name != "serve":
            assert given <= known | {"--help"}, words


@every_page
def test_modules_targets_and_scripts_on_a_page_are_there(page):
    targets = set(re.findall(r"^([\w/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in named_commands(page):
        name = Path(words[0]).name
        if name in ("python", "python3") and words[1:2] == ["-m"]:
            module = words[2].removeprefix("manta.")
            assert module in ("pip", "venv") or importlib.util.find_spec(module.split(":")[0]), words
        elif name in ("python", "python3", "pytest"):
            for word in words[1:]:
                if re.fullmatch(r"[\w/]+\.py(::\S+)?", word):
                    assert (ROOT / word.partition("::")[0]).is_file(), words
        elif name == "make":
            assert {word for word in words[1:] if re.fullmatch(r"[a-z][\w/-]*", word)} <= targets, words


@every_page
def test_configurations_on_a_page_are_read_as_they_stand_there(page):
    """Whole files, the args of an application, or a list `models`; Ray Serve LLM's own are left out."""
    for block in blocks(page, "yaml"):
        found = yaml.safe_load(block.replace("{...}", "{}"))
        if not isinstance(found, dict):
            continue
        for application in found.get("applications", [found]):
            args = application.get("args", application)
            if "import_path" in application and application["import_path"] != "manta:build":
                continue
            if isinstance(args, dict) and "models" in args:
                args = {key: value for key, value in args.items() if key != "autoscaling_policy"}
                args["models"] = [{"name": "m", "model": "pocket"} | model for model in args["models"]]
                AppConfig.parse(args)


def test_one_table_names_what_was_not_run_on_a_gpu_and_its_files_exist():
    text = (ROOT / "docs" / "gpu.md").read_text()
    table = text.partition("## What was not run on a GPU")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:engine|placement)/[\w/.]+)`", table))
    assert named and [file for file in named if not (ROOT / file).exists()] == []
    kernels = (file.relative_to(ROOT) for file in (ROOT / "engine/model/ops/gpu").rglob("*.py"))
    unnamed = [str(file) for file in kernels if not named & {str(file), *map(str, file.parents)}]
    assert unnamed == ["engine/model/ops/gpu/__init__.py"]
    says = re.compile(
        r"not (run )?on a GPU yet|(None|Nothing)[\w ]*has run on a GPU|run under Triton's interpreter only"
    )
    files = [*ROOT.glob("*.md"), *(file for kind in ("docs/**/*.md", "[ep]*/**/*.py") for file in ROOT.glob(kind))]
    found = {str(file.relative_to(ROOT)) for file in files if says.search(" ".join(file.read_text().split()))}
    assert found == {"docs/gpu.md", "docs/reference.md", "engine/assembly/open_setup.py"}, "two are an option's"


def test_reference_is_what_the_code_says():
    assert (ROOT / "docs" / "reference.md").read_text() == reference(), "python tools/reference.py > docs/reference.md"


def test_the_table_of_routes_is_what_the_code_says():
    assert routes.PAGE.read_text() == routes.page(routes.PAGE.read_text()), "python tools/routes.py"


def test_calls_of_admins_routes_on_pages_have_an_admins_key():
    paths = {route.path for route in routes.routes() if route.audience is Audience.ADMIN}
    calls = [call for page in PAGES for call in re.findall(r"\bcurl (?:[^\n`]|\\\n)*", page.read_text())]
    of_admins = [call for call in calls if any(path in call for path in paths)]
    assert of_admins and [call for call in of_admins if "Bearer $ADMIN_KEY" not in call] == []


def test_examples_of_models_on_gpus_ask_for_gpus():
    """Without `num_gpus` Ray shows a rank no GPU. `pocket`, and ranks on CPUs by name, need none."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for words in commands(page):
            is_serve = Path(words[0]).name == "manta" and words[1:2] == ["serve"]
            if is_serve and re.search(r"(Qwen|llama|Llama|Mistral)\S*-\d+B", " ".join(words)):
                assert {"--num-gpus", "--device"} & {word.partition("=")[0] for word in words}, (page, words)
        for block in blocks(page, "yaml"):
            if re.search(r"model: (/models/|\S+-\d+B)", block):
                assert "num_gpus" in block, (page, block)
