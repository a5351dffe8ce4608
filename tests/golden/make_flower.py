"""Writes tests/golden/flower-fedavg.json: the results of Flower's FedAvg on the Updates of ``support.flower``.

    python tests/golden/make_flower.py [VENV]

The script creates VENV if it does not exist, with the ``flwr`` version that is pinned here and without fanin. The
default is a temporary environment.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

SUPPORT = Path(__file__).parents[1] / "support"
TARGET = Path(__file__).parent / "flower-fedavg.json"
FLOWER = "flwr==1.41.0"


def flower_results(folder: Path, data: dict[str, object]) -> str:
    """Run Flower in the environment of that folder. Return its output."""
    if not folder.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", FLOWER], check=True)
    command = [str(folder / "bin" / "python"), str(SUPPORT / "flower_fedavg.py")]
    return subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the file."""
    sys.path.insert(0, str(SUPPORT.parent))
    from support.flower import run_federation

    with TemporaryDirectory() as folder:
        data = run_federation(Path(folder) / "federation", "fixed32").request
        place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "venv"
        TARGET.write_text(flower_results(place, data))


if __name__ == "__main__":
    main()
