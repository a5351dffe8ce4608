"""Help and mistakes in the options come before torch and the runtimes, whose imports take seconds."""

import subprocess
import sys

import pytest

from fanin.commands.bench import BENCHES
from fanin.commands.main import SUBCOMMANDS
from fanin.commands.plan import DEVICE_NAMES, LINK_NAMES, PRESET_NAMES

SCRIPT = """
import sys
from fanin.commands.main import main

try:
    status = main(sys.argv[1:])
except SystemExit as exc:
    status = exc.code
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


HELP = """
import contextlib
import io
import sys
from fanin.commands.bench import BENCHES
from fanin.commands.main import SUBCOMMANDS, main

heavy = {"torch", "onnx", "onnxruntime", "ai_edge_litert", "tflite_runtime", "flwr", "ray", "matplotlib", "grpc"}
needed = [("config",), ("join",), ("serve",), ("verify",), *(("bench", name) for name in BENCHES)]
others = [(name,) for name in SUBCOMMANDS if (name,) not in needed]
for words in [*others, *needed]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        assert main([*words, "--help"]) == 0
    print(*words, *sorted(heavy & sys.modules.keys()))
"""


def test_no_help_imports_torch_or_a_runtime() -> None:
    process = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    needing = 4 + len(BENCHES)
    assert lines[:-needing] == [name for name in SUBCOMMANDS if name not in ("config", "join", "serve", "verify")]
    # A device, a coordinator's folder and the benchmarks use grpc. The process imports nothing else.
    assert {line.partition(" grpc")[2] for line in lines[-needing:]} == {""}


@pytest.mark.heavy
def test_the_help_of_plan_has_the_names_of_all_presets_links_and_devices() -> None:
    from fanin.datacenter.families.decoders import PRESETS
    from fanin.datacenter.network.links import LINKS
    from fanin.datacenter.watch.flops import HARDWARE

    assert (tuple(PRESETS), tuple(LINKS), tuple(HARDWARE)) == (PRESET_NAMES, LINK_NAMES, DEVICE_NAMES)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["export", "app.py:app", "--formats", "onnx"], 2),
        (["export", "app.py:app"], 2),
        (["export", "app.py:app", "--check", "--pretrain", "digits"], 2),
        (["export", "app.py:app", "--out", "bundle", "--max-int8-drop", "nan"], 2),
        (["train", "job.toml", "--nodes", "two"], 2),
    ],
)
def test_a_command_answers_without_torch(words: list[str], status: int) -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert process.returncode == status, process.stderr
    assert process.stderr.splitlines()[-1] == "False"
