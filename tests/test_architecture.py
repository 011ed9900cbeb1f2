"""What may import what. The engine has to run under plain pytest, on a CPU, without Ray."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from deployments.parts.table import PARTS, spec_of
from tests.imports import ROOT, imported_files, imported_modules, imported_packages, outline

ORDER = ["engine", "placement", "deployments", "cluster", "manta"]  # each may import those before it
# the rooms of engine/, in reading order; rooms of one line do not import each other
ENGINE_ORDER = [
    {"devices"},
    {"wire"},
    {"fairness"},
    {"text", "distributed"},
    {"pooling", "multimodal", "grammars"},
    {"model"},
    {"kv_transfer", "kv_offload", "spec_decode", "lora", "eplb", "kernel_trial"},
    {"runner"},
    {"core"},
    {"costs"},
    {"parts"},
    {"assembly"},
    {"serving"},
    {"offline"},
]
MAX_FILES = 16  # side by side in one folder
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ORDER}
MAY_USE_TORCH_DISTRIBUTED = {"engine/distributed/tp_group.py", "engine/distributed/process_group.py"}


def circle_in(arrows: dict[Path, set[Path]]) -> list[Path]:
    """Some circle of a graph, or nothing."""
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def classes_of(file: Path) -> list[tuple[str, int]]:
    return outline(file.read_text(encoding="utf-8")).classes


def uses_torch_distributed(source: str) -> bool:
    if "distributed" not in source:
        return False
    attributes = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    names = imported_modules(source) | attributes
    return any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names)


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import ray", {"ray"}),
        ("import ray.serve as serve, json", {"ray", "json"}),
        ("from ray.serve import deployment", {"ray"}),
        ("def f():\n    from cluster import app", {"cluster"}),
        ("if TYPE_CHECKING:\n    import deployments.ingress", {"deployments"}),
        ("from . import ray", set()),
        ("ray = 'import ray'", set()),
    ],
)
def test_every_way_to_import_is_seen(source, packages):
    assert imported_packages(source) == packages


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed import all_reduce", True),
        ("import torch\ntorch.distributed.barrier()", True),
        ("import torch\ngroup = torch.distributed", True),
        ("import torch\ntorch.distributions.Normal", False),
        ("from torch import Tensor", False),
    ],
)
def test_every_way_to_torch_distributed_is_seen(source, used):
    assert uses_torch_distributed(source) == used


def test_no_text_names_a_module_of_ours_from_the_root():
    """The wheel has our packages below `manta`, so a module that is imported by name is named from `__package__`."""
    named = re.compile(rf"(?:{'|'.join(ORDER)})(?:\.\w+)+\.?")
    for file in FILES["engine"]:
        source = file.read_text(encoding="utf-8")
        is_named = named.search(re.sub(r"^\s*(?:from|import) .*", "", source, flags=re.MULTILINE))
        tree = ast.parse(source if is_named else "")
        for text in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]:
            if isinstance(text, str) and (found := named.fullmatch(text.partition(":")[0])):
                path = ROOT.joinpath(*found[0].strip(".").split("."))
                is_ours = path.is_dir() or path.with_suffix(".py").is_file()
                assert not is_ours or path.with_suffix(".py") == file, f"{file}: {text!r}"


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_nothing_above_it(folder):
    above = set(ORDER[ORDER.index(folder) + 1 :]) | {"k8s", "tests"}
    assert FILES[folder], "a folder was moved"
    for file in FILES[folder]:
        assert not imported_packages(file.read_text(encoding="utf-8")) & above, file


def test_the_rooms_of_the_engine_import_those_before_them_only():
    rank = {room: i for i, rooms in enumerate(ENGINE_ORDER) for room in rooms}
    engine = ROOT / "engine"
    for file in [file for file in FILES["engine"] if file != engine / "__init__.py"]:
        room = file.relative_to(engine).parts[0]
        for other in imported_files(file):
            above = other.relative_to(engine).parts[0]
            if above in rank and above != room:
                assert room in rank and rank[above] < rank[room], f"{file} imports {other}"


def test_what_stands_side_by_side_in_a_folder_imports_in_one_direction():
    """Files of a folder, with each folder inside it taken as one. `engine/__init__.py`, the door, is left out."""
    files = [file for some in FILES.values() for file in some if file != ROOT / "engine" / "__init__.py"]
    arrows = {file: imported_files(file) for file in files}
    for folder in sorted({parent for file in files for parent in file.parents if parent.is_relative_to(ROOT)}):
        inside: dict[Path, set[Path]] = {}
        for file in files:
            if not file.is_relative_to(folder):
                continue
            child = folder / file.relative_to(folder).parts[0]
            for other in arrows[file]:
                if other.is_relative_to(folder) and other in arrows:
                    neighbour = folder / other.relative_to(folder).parts[0]
                    if neighbour != child:
                        inside.setdefault(child, set()).add(neighbour)
        circle = [str(path.relative_to(ROOT)) for path in circle_in(inside)]
        assert not circle, " -> ".join(circle)


@pytest.mark.parametrize(
    ("room", "door"),
    [
        ("engine/model/ops/cpu", ("engine/model/ops/", "engine/runner/")),
        ("cluster/lab", ("cluster/cli/",)),
    ],
)
def test_what_may_be_left_out_is_imported_by_its_door_only_and_says_in_a_readme_what_it_is(room, door):
    files = {str(file.relative_to(ROOT)): file for files in FILES.values() for file in files}
    name = room.replace("/", ".")
    users = {
        path
        for path, file in files.items()
        if any(f"{module}.".startswith(f"{name}.") for module in imported_modules(file.read_text(encoding="utf-8")))
    }
    assert users and all(path.startswith((f"{room}/", *door)) for path in users)
    assert (ROOT / room / "README.md").is_file()


NEEDS = {name: set(spec_of(name).needs) for name in PARTS}
APPLICATION = ("app.py", "ingress.py", "decode.py", "prefill.py", "prefill_decode.py")


def test_only_what_starts_an_application_or_a_replica_imports_parts_of_the_edge():
    """Else a part could not be left out of the table."""
    parts = ROOT / "deployments" / "parts"
    roots = {ROOT / "deployments" / name for name in APPLICATION}
    importers = {file for file in FILES["deployments"] if any(parts in other.parents for other in imported_files(file))}
    assert {file for file in importers if parts not in file.parents} <= roots
    assert importers & roots, "a folder was moved"


def test_each_part_of_the_edge_is_a_folder_that_says_what_it_is_and_imports_only_parts_that_it_needs():
    room = ROOT / "deployments" / "parts"
    assert NEEDS.keys() == {file.parent.name for file in room.glob("*/README.md")}
    assert NEEDS.keys() == {file.parent.name for file in room.glob("*/__init__.py")}
    for name in NEEDS:
        assert len((room / name / "README.md").read_text(encoding="utf-8").splitlines()) <= 12, name
        files = [file for file in FILES["deployments"] if room / name in file.parents]
        imported = {other for file in files for other in imported_files(file) if room in other.parents}
        others = {other.relative_to(room).parts[0] for other in imported}
        assert others - {name, "setup.py"} == NEEDS[name], name


def test_nothing_that_serves_comes_near_the_lab():
    """Not by way of other files, not inside a function, and not by name."""
    reached, todo = set[Path](), [ROOT / "cluster" / "cli" / "serve.py", ROOT / "manta" / "__init__.py"]
    for file in [file for folder in ("engine", "placement", "deployments", "cluster") for file in FILES[folder]]:
        if not file.is_relative_to(ROOT / "cluster" / "cli") and not file.is_relative_to(ROOT / "cluster" / "lab"):
            todo.append(file)
    while todo:
        if (file := todo.pop()) not in reached:
            reached.add(file)
            todo += imported_files(file)
    assert not [file for file in reached if file.is_relative_to(ROOT / "cluster" / "lab")]
    assert not {file for file in reached if "cluster.lab" in file.read_text(encoding="utf-8")}


def test_no_folder_has_more_files_than_one_takes_in_at_a_glance():
    for folder in {file.parent for files in FILES.values() for file in files}:
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= MAX_FILES, f"{folder} has {len(files)} files"


MAX_ARGUMENTS = 8  # of a constructor; a record has the fields that it needs


def test_constructors_take_few_arguments():
    """Written ones, without `self`. What takes more has more than one task, or needs a record."""
    classes = [each for files in FILES.values() for file in files for each in classes_of(file)]
    long = {name: count for name, count in classes if count > MAX_ARGUMENTS}
    assert max(count for _, count in classes) == MAX_ARGUMENTS, "nothing is counted, or the limit may be lower"
    assert not long


def test_no_class_name_stands_twice_within_a_package():
    """But in bodies of the APIs, whose names are theirs, and for vLLM's SamplingParams, which users write."""
    for folder in ORDER:
        names = [
            name
            for file in FILES[folder]
            if "_bod" not in file.name and file != ROOT / "engine" / "offline" / "sampling_params.py"
            for name, _ in classes_of(file)
        ]
        assert not [name for name, count in Counter(names).items() if count > 1], folder


def test_nothing_from_outside_enters_a_scheduler_but_by_apply():
    """What a tape has not heard of could not be replayed."""
    parts = "handoffs|images|fetching|holds|adapters|loading|offloading|kv_cache|queue|moves"
    changes = "add|abort|handle|clear|release|give|switch|stuck|answered|update|set_prefill_replicas|new_load|loaded"
    way = re.compile(rf"scheduler\.(?:(?:{parts})\.)?(?:{changes})\(")
    for file in [file for room in ("engine", "deployments", "cluster") for file in FILES[room]]:
        if "engine/parts" not in str(file):
            assert not way.findall(file.read_text(encoding="utf-8")), file


def test_the_scheduler_and_all_that_it_uses_name_no_part():
    """It knows the hooks of parts alone (door/part.py)."""
    core, reached, todo = ROOT / "engine" / "core", set[Path](), [ROOT / "engine" / "core" / "scheduler.py"]
    while todo:
        if (file := todo.pop()) not in reached:
            reached.add(file)
            todo += imported_files(file)
    assert core / "door" / "part.py" in reached
    assert not [file for file in reached if file.is_relative_to(ROOT / "engine" / "parts")]


def test_each_part_of_an_engine_is_a_folder_that_says_what_it_is_and_imports_only_parts_that_it_needs():
    room = ROOT / "engine" / "parts"
    readmes = sorted(room.glob("*/README.md"))
    assert {readme.parent for readme in readmes} == {file.parent for file in room.glob("*/__init__.py")}
    for readme in readmes:
        text = readme.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 14, readme
        needs = set(re.findall(r"`(\w+)`", text[text.index("Needs:") : text.index("Page:")]))
        imported = {other for file in readme.parent.rglob("*.py") for other in imported_files(file)}
        inside = {other.relative_to(room) for other in imported if room in other.parents and other.parent != room}
        others = {other.parts[0] for other in inside}
        assert others - {readme.parent.name} == needs, readme


FEATURES = {"lora", "spec_decode", "eplb", "kv_offload", "kv_transfer", "kernel_trial"}
"""Rooms of which a rank's runner knows nothing but hooks of parts."""


def test_the_runner_names_no_feature_that_is_a_part_of_a_rank():
    runner = ROOT / "engine" / "runner"
    files = [*runner.rglob("*.py")]
    assert {runner / f"{name}.py" for name in ("model_runner", "inputs", "kv_cache", "worker")} <= {*files}
    for file in files:
        for other in imported_files(file):
            room = other.relative_to(ROOT / "engine").parts[0]
            assert room not in FEATURES, f"{file} imports {other}"


def test_no_file_of_the_engine_names_ray():
    for file in FILES["engine"]:
        assert "ray" not in imported_packages(file.read_text(encoding="utf-8")), file


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        pytest.param(
            "import engine.offline.llm, engine.serving.server\n"
            "from engine.assembly.build import build_engine\n"
            "from engine.config import EngineConfig\n"
            "build_engine(EngineConfig(num_gpu_blocks_override=8, max_model_len=64, num_threads=1)).close()",
            {"ray", "transformers", "torch._dynamo", "sympy"},
            id="the engine of a native model without Ray, transformers and compilers of graphs",
        ),
        # each takes seconds, also of the start of a server, which looks at its configuration first
        pytest.param(
            "import cluster.cli.main, deployments.app\n"
            "from cluster.serve_config import check\n"
            "check(Path('serve_config.yaml'))\n"
            "from cluster.cli import serve  # Ray reads its environment when it is imported\n"
            "config = serve.configuration('pocket', {}, {'host': '127.0.0.1', 'port': 8000})\n"
            "serve.set_environment(config, None)\n"
            "serve.check(config, 'auto')",
            {"ray", "torch", "transformers", "cluster.lab"},
            id="the API and what looks at a configuration without Ray, torch and the lab",
        ),
        pytest.param(
            "import cluster.app, cluster.autoscaling.policy, placement.rank_actor",
            {"torch", "transformers", "cluster.lab"},
            id="processes that do not compute without torch and the lab",
        ),
    ],
)
def test_a_process_does_without_what_it_has_no_use_for(code, absent):
    program = f"import sys\nfrom pathlib import Path\n{code}\nassert not {absent} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_distributed_stays_in_the_tensor_parallel_group_and_its_collectives():
    for file in [file for files in FILES.values() for file in files]:
        if file.relative_to(ROOT).as_posix() not in MAY_USE_TORCH_DISTRIBUTED:
            assert not uses_torch_distributed(file.read_text(encoding="utf-8")), file


def test_the_scheduler_and_what_it_owns_know_neither_torch_nor_clock_nor_socket():
    core = ["scheduler", "request_queue", "door/request_checks", "kv_cache_manager", "block_allocator",
            "step_plan_builder", "block_pool", "request", "output"]  # fmt: skip
    parts = ROOT / "engine" / "parts"
    folders = [folder for folder in parts.iterdir() if folder.is_dir() and folder.name != "tape"]
    plan = [
        f"parts/{file.relative_to(parts).with_suffix('')}"
        for folder in folders
        for file in folder.glob("*.py")
        if file.stem not in OTHER_ENDS
    ]
    protocol = ["protocol", "decode_side", "prefill_side", "receive_state", "messages", "effects"]
    wire = ["plan", "sampling_params", "generate_request", "token_delta", "messages", "remote_request", "handoff"]
    wire += ["stats/engine_stats", "stats/handoff_stats"]
    names = [*(f"core/{name}" for name in core), *plan, *(f"kv_transfer/protocol/{name}" for name in protocol)]
    for name in [*names, *(f"wire/{name}" for name in wire), "config", "config_options", "engine_options", "errors"]:
        packages = imported_packages((ROOT / "engine" / f"{name}.py").read_text(encoding="utf-8"))
        assert not packages & {"torch", "time", "zmq", "socket", "asyncio", "threading"}, name


# Their clock, randomness and sockets come from outside, so that tests/days can run a whole cluster of them.
OTHER_ENDS = {"publisher"}
"""Files of parts that neither decide nor are simulated: their ends on sockets."""
SIMULATED = """
    engine/core/*.py engine/parts/[!t]*/*.py engine/serving/*.py
    engine/kv_transfer/endpoint.py engine/kv_transfer/protocol/*.py engine/fairness/fair_queue.py
    deployments/frontend/admission.py deployments/frontend/generation.py deployments/frontend/inboxes.py
    deployments/frontend/retry.py deployments/frontend/sequence.py
    deployments/replicas/departure.py deployments/replicas/engine_control.py deployments/replicas/rebalancing.py
    deployments/replicas/remote_dispatcher.py
    deployments/routing/balancer.py deployments/routing/cost.py deployments/routing/placements.py
    deployments/routing/policies.py deployments/routing/prefix_index.py deployments/routing/subscriptions.py
"""
CHANCE = re.compile(r"\b(time\.(monotonic|time|perf_counter)(_ns)?|random\.(?!Random\b)\w+|secrets\.\w+|uuid\.\w+)\b")


def test_what_tests_days_simulates_asks_no_clock_and_no_source_of_chance_of_its_own():
    files = [file for pattern in SIMULATED.split() for file in ROOT.glob(pattern) if file.stem not in OTHER_ENDS]
    assert all(list(ROOT.glob(pattern)) for pattern in SIMULATED.split()), "a file was moved"
    for file in files:
        assert not (found := CHANCE.search(file.read_text(encoding="utf-8"))), f"{file}: {found and found[0]}"
