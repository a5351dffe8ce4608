"""The disk cache of converted graphs: equal graphs are converted once, and different graphs have different keys."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import pytest
import torch
from torch import Tensor, nn

from fanin.edge import export
from fanin.edge.export import App
from fanin.edge.export.app.optimizers.recipe import Recipe
from fanin.edge.export.app.optimizers.rules import Sgd
from fanin.edge.export.formats.cache import LIBRARIES, VARIABLE, CacheFolder, digest_of, folder_from
from fanin.edge.export.formats.onnx.writer import to_onnx
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.decompositions.tables import ONNX, TFLITE
from fanin.edge.export.graph.forward import trace_evaluate
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare

KEY = "0" * 64


class Scaled(nn.Module):
    """A layer whose output is multiplied by a number and shifted by a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, width)
        self.register_buffer("shift", torch.linspace(0.0, 1.0, width))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return torch.relu(self.layer(x)) * 2.0 + self.shift


class Halved(Scaled):
    """``Scaled`` with another factor."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return torch.relu(self.layer(x)) * 0.5 + self.shift


class Renamed(Scaled):
    """``Scaled`` with another name of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.layer
        del self.layer

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return torch.relu(self.other(x)) * 2.0 + self.shift


def app(module: nn.Module, recipe: Recipe | None = None) -> App:
    x = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)
    return App(name="scaled", module=module, calibration=x, batch_size=4, num_classes=4, recipe=recipe or Recipe())


def evaluate_graph(module: nn.Module, **changes: int) -> Traced:
    return trace_evaluate(prepare(replace(app(module), **changes)), ONNX)


def key_of(traced: Traced, graph_format: str = "onnx") -> str:
    key = digest_of(graph_format, {"evaluate": traced})
    assert key is not None
    return key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the graph cache."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "graphs"))
    return tmp_path / "graphs"


def overwrite_file(folder: Path, data: bytes) -> None:
    """Write other bytes under the only key. The result then shows whether the cache was read."""
    (file,) = folder.iterdir()
    CacheFolder(folder).write(file.name, data)


def test_an_equal_graph_is_not_converted_again(folder: Path) -> None:
    first = to_onnx(evaluate_graph(Scaled()), "first")
    assert folder.stat().st_mode & 0o777 == 0o700
    first.producer_name = "kept"
    overwrite_file(folder, first.SerializeToString())
    assert to_onnx(evaluate_graph(Scaled()), "second") == first
    assert to_onnx(evaluate_graph(Halved()), "other").producer_name != "kept"


def test_a_tflite_file_is_not_converted_again(folder: Path) -> None:
    prepared = prepare(app(Scaled()))
    to_tflite({"evaluate": trace_evaluate(prepared, TFLITE)}, "first")
    overwrite_file(folder, b"kept")
    assert to_tflite({"evaluate": trace_evaluate(prepared, TFLITE)}, "second") == b"kept"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: evaluate_graph(Halved()), id="a number"),
        pytest.param(lambda: evaluate_graph(Scaled(width=5), num_classes=5), id="a width"),
        pytest.param(lambda: evaluate_graph(Scaled(), batch_size=5), id="a batch size"),
        pytest.param(lambda: evaluate_graph(Renamed()), id="a name"),
        pytest.param(lambda: trace_train(prepare(app(Scaled())), ONNX), id="another Signature"),
    ],
)
def test_another_graph_has_another_key(other: Callable[[], Traced]) -> None:
    assert key_of(other()) != key_of(evaluate_graph(Scaled()))


def test_constants_are_part_of_the_key() -> None:
    keys = set()
    for shift in (0.0, 0.5):
        module = nn.Sequential(Scaled(width=512), nn.Linear(512, 4))
        with torch.no_grad():
            module[0].layer.weight.add_(shift)
        prepared = prepare(app(module, recipe=Recipe(optimizer=Sgd(), trains="head")))
        assert prepared.frozen
        keys.add(key_of(trace_train(prepared, ONNX)))
    assert len(keys) == 2


def with_transposed_strides(value: Tensor) -> Tensor:
    return value.t().contiguous().t() if value.dim() == 2 else value


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda traced: replace(traced, inputs=[*traced.inputs[:-1], "other"]), id="name of an input"),
        pytest.param(lambda traced: replace(traced, outputs=["other", *traced.outputs[1:]]), id="name of an output"),
        pytest.param(
            lambda traced: replace(traced, examples=list(map(with_transposed_strides, traced.examples))), id="strides"
        ),
    ],
)
def test_names_and_strides_of_the_ports_are_part_of_the_key(change: Callable[[Traced], Traced]) -> None:
    traced = evaluate_graph(Scaled())
    assert key_of(change(traced)) != key_of(traced)


def test_versions_of_the_libraries_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {digest_of("onnx", {})}
    for name in LIBRARIES["onnx"]:
        info = tmp_path / name / f"{name.replace('-', '_')}-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(info.parent)
            keys.add(digest_of("onnx", {}))
    assert len(keys) == 1 + len(LIBRARIES["onnx"])


def test_the_source_of_the_exporter_is_part_of_the_key(tmp_path: Path) -> None:
    shutil.copytree(export.__path__[0], tmp_path / "export", ignore=shutil.ignore_patterns("__pycache__"))

    def key() -> object:
        return run_path(str(tmp_path / "export" / "formats" / "cache.py"))["digest_of"]("onnx", {})

    assert key() == digest_of("onnx", {})
    with (tmp_path / "export" / "quiet.py").open("a") as file:
        file.write("# Another release.\n")
    assert key() != digest_of("onnx", {})


def test_a_graph_with_a_part_of_another_kind_has_no_key() -> None:
    traced = evaluate_graph(Scaled())
    module = traced.program.graph_module
    module.part = object()  # type: ignore[assignment]  # what a later torch may put there
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.create_node("get_attr", "part")
    assert digest_of("onnx", {"evaluate": traced}) is None


def test_formats_have_keys_of_their_own() -> None:
    traced = evaluate_graph(Scaled())
    assert key_of(traced, "onnx") != key_of(traced, "tflite")


@pytest.mark.nightly
def test_the_key_is_the_same_in_another_process() -> None:
    program = "from unit.test_graph_cache import *; print(key_of(trace_train(prepare(app(Scaled())), ONNX)))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == key_of(trace_train(prepare(app(Scaled())), ONNX))


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    for damage in (b"", b"\xff" * 80, b"short"):
        folder.write(KEY, b"graph")
        assert folder.read(KEY) == b"graph"
        (tmp_path / KEY).write_bytes(damage)
        assert folder.read(KEY) is None
    content = f"{KEY}\ngraph".encode()
    (tmp_path / KEY).write_bytes(content)
    assert folder.read(KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = CacheFolder(tmp_path / "file" / "graphs")
    folder.write(KEY, b"graph")
    assert folder.read(KEY) is None
    (tmp_path / KEY).mkdir()
    CacheFolder(tmp_path).write(KEY, b"graph")
    assert CacheFolder(tmp_path).read(KEY) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [KEY, "file"]


def test_the_files_that_were_not_used_are_removed_first(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, max_bytes=8 * 200)
    keys = [f"{index:064}" for index in range(9)]
    for index, key in enumerate(keys):
        if index == 8:
            folder.read(keys[0])
        folder.write(key, bytes(130))
        os.utime(tmp_path / key, (index, index))
    assert folder.read(keys[0]) == bytes(130)
    assert folder.read(keys[1]) is None
    folder.write(KEY[:-1] + "a", bytes(201))
    assert folder.read(KEY[:-1] + "a") is None


def test_the_environment_names_the_folder() -> None:
    assert folder_from({"XDG_CACHE_HOME": "/cache"}).path == Path("/cache/fanin/graphs")
    assert folder_from({VARIABLE: "/graphs", "XDG_CACHE_HOME": "/cache"}).path == Path("/graphs")
    off = folder_from({VARIABLE: "off"})
    off.write(KEY, b"graph")
    assert off.read(KEY) is None
