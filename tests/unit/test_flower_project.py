"""What a Flower project has: the app and the configuration of its pyproject.toml, and its initial arrays in files."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters
from support.errors import raises
from support.flower_apps import MESSAGE_APP, NUMPY_APP, write_app

from fanin.clients.flower.app import FlowerApp, arrays_of, initial_arrays
from fanin.clients.flower.initial import read_initial
from fanin.clients.flower.process import FlowerProcess
from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.protos.errors import InvalidInput, RuntimeMissing

ARRAYS: Final = {"w": np.array([0.5, 2.0]), "n": np.array(3)}


def project(folder: Path, name: str) -> Path:
    """Write a project whose pyproject.toml names the app ``name:app``."""
    write_app(folder, name, NUMPY_APP)
    (folder / "pyproject.toml").write_text(f'[tool.flwr.app.components]\nclientapp = "{name}:app"\n')
    return folder


def test_a_folder_names_the_client_app_of_its_project(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", "named_by_project")
    for settings in (
        FlowerSettings(app=".", folder=folder),
        FlowerSettings(app="project", folder=tmp_path),
        FlowerSettings(app=str(folder), folder=Path.cwd()),
    ):
        assert len(FlowerApp(settings).initial()) == 12
    with FlowerProcess(FlowerSettings(app="project", folder=tmp_path)) as process:
        assert process.name.startswith("flwr ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "[project]\nname = 'x'\n",
            "has no clientapp in [tool.flwr.app.components], expected package.module:name; add",
        ),
        ("[tool.flwr.app]\ncomponents = 3\n", "has no clientapp in [tool.flwr.app.components]"),
        ("[tool\n", "cannot be read (Expected"),
    ],
)
def test_a_folder_without_a_project_is_one_error(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AppFailed, match=re.escape(f"flower app .: {tmp_path}/pyproject.toml")) as excinfo:
        FlowerApp(FlowerSettings(app=".", folder=tmp_path))
    assert error in str(excinfo.value)


def test_a_folder_without_a_pyproject_is_one_error(tmp_path: Path) -> None:
    text = f"flower app .: {tmp_path}/pyproject.toml: cannot be read (No such file or directory); name MODULE:APP"
    with raises(AppFailed, text):
        FlowerApp(FlowerSettings(app=".", folder=tmp_path))


def write_npz(path: Path) -> None:
    np.savez(path, **ARRAYS)


def write_npy(path: Path) -> None:
    np.save(path, ARRAYS["w"])


def write_state(path: Path) -> None:
    import torch

    torch.save({name: torch.from_numpy(value) for name, value in ARRAYS.items()}, path)


def write_checkpoint(path: Path) -> None:
    import torch

    state = {name: torch.from_numpy(value) for name, value in ARRAYS.items()}
    torch.save({"epoch": 3, "state_dict": state, "optimizer_states": []}, path)


def write_safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(ARRAYS, path)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.npz", write_npz),
        ("a.npy", write_npy),
        ("a.pt", write_state),
        ("a.pth", write_state),
        ("a.ckpt", write_checkpoint),
        ("a.safetensors", write_safetensors),
    ],
)
def test_the_files_that_apps_have_are_initial_arrays(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    arrays = read_initial(str(tmp_path / name), tmp_path)
    expected = {"0": ARRAYS["w"]} if name.endswith("npy") else ARRAYS
    assert {each: (value.dtype, value.tolist()) for each, value in arrays.items()} == {
        each: (value.dtype, value.tolist()) for each, value in expected.items()
    }


SERVER: Final = """
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
import numpy as np

app = ServerApp()


@app.main()
def main(grid, context):
    try:
        weight = np.full(2, context.run_config["start"])
        strategy = FedAvg(min_available_nodes=7)
        strategy.start(grid=grid, initial_arrays=ArrayRecord([weight]), num_rounds=3)
    except Exception:
        pass
    raise RuntimeError("the training has ended")
"""
LIST_SERVER: Final = """
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
import numpy as np


def server_fn(context):
    parameters = ndarrays_to_parameters([np.full(2, context.run_config["start"])])
    return ServerAppComponents(strategy=FedAvg(initial_parameters=parameters), config=ServerConfig(num_rounds=3))


app = ServerApp(server_fn=server_fn)
"""
NO_ARRAYS: Final = SERVER[: SERVER.index("    try:")] + "    return None\n"
BROKEN: Final = "raise OSError('no server here')\n"


def server_project(folder: Path, name: str, server: str, client: str = MESSAGE_APP) -> Path:
    """Write a project with a client app and a server app."""
    write_app(folder, f"{name}_client", client)
    (folder / f"{name}_server.py").write_text(server)
    components = f'clientapp = "{name}_client:app"\nserverapp = "{name}_server:app"\n'
    (folder / "pyproject.toml").write_text(
        f"[tool.flwr.app.components]\n{components}[tool.flwr.app.config]\nstart = 1.5\nscale = 1.0\n"
    )
    return folder


@pytest.mark.parametrize(("name", "server"), [("messages", SERVER), ("lists", LIST_SERVER)])
def test_the_server_app_of_a_project_has_the_initial_arrays(
    tmp_path: Path, name: str, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    level = logger.level
    settings = FlowerSettings(app=".", folder=server_project(tmp_path, name, server))
    arrays = initial_arrays(settings, FlowerApp(settings))
    assert {each: value.tolist() for each, value in arrays.items()} == {"0": [1.5, 1.5]}
    named = read_initial(f"{name}_server:app", tmp_path)
    assert named["0"].tolist() == [1.5, 1.5]
    assert caplog.records == [], "no federation takes place that Flower could report"
    assert logger.level == level


def test_a_client_has_the_initial_arrays_that_the_server_app_lacks(tmp_path: Path) -> None:
    server = LIST_SERVER.replace("initial_parameters=parameters", "")
    settings = FlowerSettings(app=".", folder=server_project(tmp_path, "asking", server, NUMPY_APP))
    assert len(initial_arrays(settings, FlowerApp(settings))) == 12


@pytest.mark.parametrize(
    ("name", "server", "error"),
    [
        ("silent", NO_ARRAYS, "it sends no message; name the arrays with --initial"),
        ("broken", BROKEN, "flower app broken_server:app: import: OSError: no server here"),
    ],
)
def test_a_server_app_without_arrays_is_one_error(tmp_path: Path, name: str, server: str, error: str) -> None:
    settings = FlowerSettings(app=".", folder=server_project(tmp_path, name, server))
    with pytest.raises(AppFailed, match=re.escape(error)):
        initial_arrays(settings, FlowerApp(settings))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.pt", "a.safetensors"])
def test_a_file_of_another_format_is_one_error(tmp_path: Path, name: str) -> None:
    with raises(InvalidInput, f"--initial: {tmp_path / name}: cannot be read (No such file or directory)"):
        read_initial(str(tmp_path / name), tmp_path)
    (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(InvalidInput, match=rf"--initial: .*{name}: not a readable \.\w+ file of plain arrays \("):
        read_initial(str(tmp_path / name), tmp_path)


@pytest.mark.heavy
def test_a_pickled_module_is_not_run(tmp_path: Path) -> None:
    import torch

    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(InvalidInput, match=r"\(UnpicklingError; save the module's state_dict\(\)\)"):
        read_initial(str(tmp_path / "module.pt"), tmp_path)


@pytest.mark.heavy
def test_a_checkpoint_with_a_state_dict_under_another_key_is_one_error(tmp_path: Path) -> None:
    import torch

    torch.save({"epoch": 3, "net": torch.nn.Linear(1, 1).state_dict()}, tmp_path / "a.pt")
    message = "expected a tensor or an array of numpy"
    hint = "; if it is the state dict, pass or save it alone"
    with raises(InvalidInput, f"initial: array 'net': got OrderedDict, {message}{hint}"):
        read_initial(str(tmp_path / "a.pt"), tmp_path)
    with raises(InvalidInput, f"initial: array 'w': got str, {message}"):
        arrays_of({"w": "text"})


@pytest.mark.heavy
def test_a_checkpoint_of_torch_is_no_file_of_numpy(tmp_path: Path) -> None:
    import torch

    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "a.npz")
    message = (
        r"not a readable \.npz file of plain arrays \(a/data.pkl is no array; a checkpoint of torch needs the suffix"
    )
    with pytest.raises(InvalidInput, match=message):
        read_initial(str(tmp_path / "a.npz"), tmp_path)


def test_a_file_with_an_unknown_suffix_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^--initial: got w\.h5, expected a file with one of the suffixes \.npz, "):
        read_initial("w.h5", tmp_path)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with raises(RuntimeMissing, "--initial: a.pt: torch is not installed here; pip install torch"):
        read_initial("a.pt", tmp_path)


class Keras:
    """An object with the weights of a Keras model."""

    def get_weights(self) -> list[np.ndarray]:
        return [ARRAYS["w"], ARRAYS["n"]]


@pytest.mark.parametrize(
    "candidate",
    [
        Keras,
        Keras(),
        lambda: (ARRAYS["w"], ARRAYS["n"]),
        (ARRAYS["w"], np.int64(3)),
        ndarrays_to_parameters([ARRAYS["w"], ARRAYS["n"]]),
    ],
)
def test_the_objects_that_apps_have_are_initial_arrays(candidate: object) -> None:
    arrays = arrays_of(candidate)
    assert {name: (value.dtype, value.tolist()) for name, value in arrays.items()} == {
        "0": (np.float64, [0.5, 2.0]),
        "1": (np.int64, 3),
    }


def test_a_file_of_numpy_needs_no_flwr(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(1))
    code = (
        "import sys\nsys.modules['flwr'] = None\nfrom pathlib import Path\n"
        "from fanin.clients.flower.initial import read_initial\nprint(read_initial(sys.argv[1], Path.cwd()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.npz")]
    assert "array([1.])" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
