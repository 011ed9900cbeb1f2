"""What may import what. The engine has to run under plain pytest, on a CPU, without Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["engine", "placement", "deployments", "cluster"]  # each may import those before it
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ORDER}
MAY_USE_TORCH_DISTRIBUTED = ("engine/distributed/tp_group.py", "engine/kv_transfer/transport/")


def imported_modules(source: str) -> set[str]:
    """Full names of everything that is imported anywhere, functions and TYPE_CHECKING blocks included."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def imported_packages(source: str) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(source)}


def uses_torch_distributed(source: str) -> bool:
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


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_nothing_above_it(folder):
    above = set(ORDER[ORDER.index(folder) + 1 :]) | {"k8s", "tests"}
    assert FILES[folder], "a folder was moved"
    for file in FILES[folder]:
        assert not imported_packages(file.read_text(encoding="utf-8")) & above, file


def test_no_file_of_the_engine_names_ray():
    for file in FILES["engine"]:
        assert "ray" not in imported_packages(file.read_text(encoding="utf-8")), file


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        pytest.param("import engine.offline.llm, engine.core.server", {"ray"}, id="the engine without Ray"),
        # each takes seconds, also of the start of a server, which looks at its configuration first
        pytest.param(
            "import cluster.cli.main, deployments.openai.app\n"
            "from cluster.cli.check.serve_config import check\n"
            "check(Path('serve_config.yaml'))",
            {"ray", "torch", "transformers"},
            id="the API and what looks at a configuration without Ray and torch",
        ),
        pytest.param(
            "import cluster.app, cluster.autoscaling.policy, placement.rank_actor",
            {"torch", "transformers"},
            id="processes that do not compute without torch",
        ),
    ],
)
def test_a_process_does_without_what_it_has_no_use_for(code, absent):
    program = f"import sys\nfrom pathlib import Path\n{code}\nassert not {absent} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_distributed_stays_in_the_tensor_parallel_group_and_kv_transfer():
    for file in [file for files in FILES.values() for file in files]:
        if not file.relative_to(ROOT).as_posix().startswith(MAY_USE_TORCH_DISTRIBUTED):
            assert not uses_torch_distributed(file.read_text(encoding="utf-8")), file


def test_the_scheduler_and_what_it_owns_know_neither_torch_nor_clock_nor_socket():
    core = ["scheduler", "request_queue", "kv_cache_manager", "step_plan_builder", "block_pool", "request", "handoffs",
            "remote_prefill_policy"]  # fmt: skip
    protocol = ["protocol", "decode_side", "prefill_side", "receive_state", "messages", "events", "effects"]
    wire = ["plan", "sampling_params", "messages", "remote_prefill", "handoff_stats"]
    names = [f"core/{name}" for name in core] + [f"kv_transfer/protocol/{name}" for name in protocol]
    for name in [*names, *(f"wire/{name}" for name in wire), "config", "errors"]:
        packages = imported_packages((ROOT / "engine" / f"{name}.py").read_text(encoding="utf-8"))
        assert not packages & {"torch", "time", "zmq", "socket", "asyncio", "threading"}, name
