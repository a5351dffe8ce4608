"""The import contracts: they name existing modules, have no exceptions, and a wrong import breaks each of them."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import (
    ROOT,
    SOURCE_ROOTS,
    Module,
    contracts,
    exceptions_in_contracts,
    module_names,
    package_modules,
    root_packages,
)

from fanin.commands.main import SUBCOMMANDS

WRONG = {
    "layers": ("server/fanin/server/wrong.py", "import fanin.clients.device.session.machine"),
    "no-circles": ("edge/fanin/edge/tensors.py", "def later():\n    import fanin.edge.codecs.fixed"),
    "datacenter-layers": ("datacenter/fanin/datacenter/models/wrong.py", "import fanin.datacenter.training.loop"),
    "protos-layers": ("protos/fanin/protos/messages/reports.py", "import fanin.protos.wire"),
    "parallel-layers": (
        "datacenter/fanin/datacenter/parallel/pipelines/wrong.py",
        "import fanin.datacenter.parallel.steps",
    ),
    "export-layers": (
        "edge/fanin/edge/export/module/wrong.py",
        "def later():\n    import fanin.edge.export.graph.train",
    ),
    "commands": ("datacenter/fanin/datacenter/wrong.py", "import fanin.commands.main"),
    "subcommands": ("clients/fanin/commands/control/watch.py", "import fanin.commands.control.run"),
    "torch": ("edge/fanin/edge/wrong.py", "def later():\n    import torch.nn"),
    "safetensors": ("datacenter/fanin/datacenter/wrong.py", "import safetensors.torch"),
    "torch-free": ("clients/fanin/commands/join.py", "import fanin.edge.export"),
    "device": ("clients/fanin/commands/join.py", "import typer"),
    "grpc": ("server/fanin/server/wrong.py", "from grpc import aio"),
    "onnxruntime": ("edge/fanin/edge/runtimes/wrong.py", "import onnxruntime"),
    "flwr": ("clients/fanin/clients/flower/trainer.py", "import flwr.app"),
    "ray": ("clients/fanin/simulation/flower.py", "import ray.util"),
    "tflite-runtime": ("edge/fanin/edge/export/wrong.py", "import tflite_runtime.interpreter"),
    "litert": ("edge/fanin/edge/runtimes/wrong.py", "from ai_edge_litert import interpreter"),
    "tflite-export": ("edge/fanin/edge/runtimes/wrong.py", "import flatbuffers"),
    "onnx": ("edge/fanin/edge/runtimes/wrong.py", "import onnx.helper"),
    "database": ("server/fanin/server/wrong.py", "import sqlalchemy.orm"),
    "stores": ("server/fanin/server/rounds/wrong.py", "from fanin.server.storage.sqlite.rounds import SqliteRounds"),
    "terminal": ("clients/fanin/clients/wrong.py", "import rich.table"),
    "prometheus": ("server/fanin/server/wrong.py", "import prometheus_client.core"),
    "opentelemetry": ("server/fanin/server/wrong.py", "import opentelemetry.trace"),
    "fsspec": ("server/fanin/server/wrong.py", "import fsspec"),
    "dp-accounting": ("server/fanin/server/wrong.py", "import dp_accounting.rdp"),
    "web": ("server/fanin/server/wrong.py", "import starlette.routing"),
    "pure-cores": ("edge/fanin/edge/codecs/grid.py", "from fanin.edge.bundles import keys"),
}
"""For each contract, a file and a line that breaks the contract in it."""

BREAK = """
import contextlib, io, json, sys
from pathlib import Path
from importlinter.cli import lint_imports

def output_for(*contracts):
    # With a cache in the copy, a run reads only the changed files.
    with contextlib.redirect_stdout(io.StringIO()) as out:
        lint_imports(cache_dir=".cache", limit_to_contracts=contracts)
    return out.getvalue()

outputs = {}
for contract, (name, line) in json.loads(sys.argv[1]).items():
    path = Path(name)
    original = path.read_text() if path.exists() else None
    path.write_text((original or "") + f"\\n{line}\\n")
    outputs[contract] = output_for(contract)
    path.unlink() if original is None else path.write_text(original)
print(json.dumps(outputs | {"": output_for()}))
"""
"""Runs import-linter for each contract with its wrong import, and for all contracts without one."""

RUNTIME_LIBRARIES = ("ai_edge_litert", "onnx", "onnxruntime", "tflite_runtime")
UNUSED_ON_A_DEVICE = ("email", "fanin.v1.control_pb2", "importlib.metadata", "tomllib")
"""Modules that would cost a device 3 MB of memory without any use."""
ABSENT_FROM_JOIN = (
    *("alembic", "fanin.server", "rich", "sqlalchemy", "torch", "typer"),
    *RUNTIME_LIBRARIES,
    *UNUSED_ON_A_DEVICE,
)
ABSENT_FROM_EXPORT = ("fanin.datacenter.parallel.build", "torch.distributed.pipelining", "litert_torch", "jax", "ray")
ABSENT_FROM_SERVE = ("fanin.datacenter", "fanin.edge.export", "torch", *RUNTIME_LIBRARIES)


def test_contracts_have_no_exceptions() -> None:
    assert exceptions_in_contracts() == ()


def test_contracts_name_modules_that_exist() -> None:
    existing = module_names()
    for contract in contracts():
        missing = sorted(name for name in contract.names if name.startswith("fanin.") and name not in existing)
        assert not missing, f"contract {contract.id}: got {missing}, expected modules on disk; rename them there too"


def test_layers_name_every_root_package() -> None:
    (layers,) = (contract for contract in contracts() if contract.id == "layers")
    assert layers.names == set(root_packages())


def test_subcommands_are_all_independent() -> None:
    (subcommands,) = (contract for contract in contracts() if contract.id == "subcommands")
    assert subcommands.names == {f"fanin.commands.{entry.module}" for entry in SUBCOMMANDS.values()}


def test_each_contract_has_a_wrong_import_here() -> None:
    assert sorted(WRONG) == sorted(contract.id for contract in contracts())


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source roots and pyproject.toml, in which tests break the contracts."""
    folder = tmp_path_factory.mktemp("copy")
    for root in SOURCE_ROOTS:
        shutil.copytree(ROOT / root, folder / root, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, with the packages of the tree there."""
    # The copy precedes the editable install on the path, so its packages are found instead of the real ones.
    path = os.pathsep.join(str(folder / root) for root in SOURCE_ROOTS)
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def broken(copy: Path) -> dict[str, str]:
    """The output of import-linter for each contract, with its wrong import alone."""
    completed = run_in(copy, "-c", BREAK, json.dumps(WRONG))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    outputs = json.loads(completed.stdout.splitlines()[-1])
    assert isinstance(outputs, dict)
    return outputs


@pytest.mark.parametrize("contract", sorted(WRONG))
def test_a_wrong_import_breaks_its_contract(broken: dict[str, str], contract: str) -> None:
    assert "0 kept, 1 broken" in broken[contract], broken[contract]


def test_contracts_hold(broken: dict[str, str]) -> None:
    assert f"{len(WRONG)} kept, 0 broken" in broken[""], broken[""]


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("join", ABSENT_FROM_JOIN),
        ("serve", ABSENT_FROM_SERVE),
        ("control.verify", ABSENT_FROM_SERVE),
        ("control.fetch", ABSENT_FROM_SERVE),
        ("export", ABSENT_FROM_EXPORT),
    ],
)
def test_a_command_imports_no_more_than_it_may(command: str, absent: tuple[str, ...]) -> None:
    # The contracts check import statements. This checks the loaded modules, also lazy imports and those of libraries.
    code = f"import sys, fanin.commands.main, fanin.commands.{command}\nprint(*sys.modules, sep='\\n')"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(completed.stdout.split())
    assert f"fanin.commands.{command}" in modules
    assert sorted(modules & set(absent)) == []


def uses_of_random(module: Module) -> list[str]:
    """Return the places where a module uses ``random``, except for the type of a generator argument."""
    imports = [
        f"{module.path}:{node.lineno}: from random import"
        for node in module.nodes()
        if isinstance(node, ast.ImportFrom) and node.module == "random"
    ]
    callees = {id(node.func) for node in module.nodes() if isinstance(node, ast.Call)}
    attributes = (
        node
        for node in module.nodes()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    )
    wrong = (node for node in attributes if node.attr != "Random" or id(node) in callees)
    return [*imports, *(f"{module.path}:{node.lineno}: random.{node.attr}" for node in wrong)]


def test_pure_cores_create_no_random_numbers() -> None:
    cores = {
        name for contract in contracts() if contract.id in ("pure-cores", "plan-cores") for name in contract.sources
    }
    uses = [line for module in package_modules() if module.name in cores for line in uses_of_random(module)]
    assert not uses, "\n".join(("a pure core is given its generator:", *uses))


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("def f(rng: random.Random): return rng.random()", 0),
        ("x = random.random()", 1),
        ("x = random.Random(3)", 1),
        ("from random import Random", 1),
    ],
)
def test_a_random_number_is_detected(line: str, number: int) -> None:
    assert len(uses_of_random(Module(path="x.py", name="x", text=f"import random\n{line}\n"))) == number
