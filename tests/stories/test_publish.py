"""``fanin publish``: a job's checkpoint becomes the next Version of a Run, with one clear error for each mistake.

The coordinator, the ranks of the job and the devices are processes of their own.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from house.tree import ROOT
from safetensors.numpy import load_file, save_file
from support import federations as f
from support.commands import Fanin, fanin_in_process, one_line, usage_line
from support.models import export_bundle
from support.processes import Site

from fanin import datacenter
from fanin.clients.data.digits import split_digits
from fanin.datacenter.checkpoints.trained import read_trained
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import TrainResult
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.publish import vector_for
from fanin.datacenter.models.digits_app import app
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import RunRested, VersionPublished
from fanin.simulation import synthetic_bundle

PAGE = (ROOT / "docs/howto/publish.md").read_text().partition("\n## Train on from a Version\n")[2]
OTHER_APP = """
import torch
from fanin.edge.export import App, cross_entropy

def app():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return App(name="other", module=module, calibration=torch.rand(16, 1, 8, 8), batch_size=8, num_classes=10)
"""


NORM_APP = """
import torch
from fanin.edge.export import App, cross_entropy

def app():
    layers = torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
    module = torch.nn.Sequential(*layers)
    module[3].requires_grad_(False)
    module.register_buffer("scale", torch.ones(3))
    return App(name="norm", module=module, calibration=torch.rand(16, 1, 8, 8), batch_size=8, num_classes=10)
"""


def config_in(folder: Path, app: str, mesh: MeshShape) -> TrainConfig:
    """Return a short job on the public digits, with checkpoints and weights."""
    public = split_digits(1, 1.0, 0).public
    np.savez(folder / "data.npz", x=public.inputs["x"], y=public.y)
    return TrainConfig(
        model=ModelSettings(app=app),
        data=DataSettings(examples=folder / "data.npz", held_fraction=0.2),
        training=TrainingSettings(batch_size=16, learning_rate=0.05, optimizer="sgd"),
        stop=StopSettings(steps=4),
        checkpoints=CheckpointSettings(
            folder=folder / "checkpoints", every=2, weights=folder / "weights" / "model.safetensors"
        ),
        parallel=ParallelSettings(mesh=mesh, device="cpu"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job, of the coordinator and of the keys."""
    folder = tmp_path_factory.mktemp("publish")
    (folder / "weights").mkdir()
    (folder / "publisher.key").write_text(f.PUBLISHER.private_bytes().hex())
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> TrainResult:
    """The result of a job of two ranks."""
    config = config_in(folder, "fanin.datacenter.models.digits_app:app", MeshShape(dp_shard=2))
    return datacenter.train(config, placement=datacenter.Placement(folder=folder / "job"))


@pytest.fixture(scope="module")
def site(folder: Path, trained: TrainResult) -> Iterator[Site]:
    """A coordinator with two Runs of the job's parameters, whose first Rounds wait for devices.

    The Bundle of ``run`` is for devices that do not train, and that of ``digits`` is the App's.
    """
    site = Site(folder)
    site.serve()
    assert trained.table is not None
    shapes = {spec.name: spec.shape for spec in trained.table.specs}
    site.start_run(f.plan(), synthetic_bundle(folder / "bundle", f.PUBLISHER, shapes), f.PUBLISHER)
    digits = export_bundle(app())
    with site.operator() as operator:
        operator.publish_bundle(digits)
        operator.start_run("digits", f.plan(), digits, f.PUBLISHER)
    yield site
    site.close()


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.mark.parametrize("source", ["checkpoints", "checkpoints/step-00000004", "job", "weights", "job/parameters.bin"])
def test_each_file_of_a_job_has_its_trained_values(folder: Path, trained: TrainResult, source: str) -> None:
    assert trained.table is not None and trained.parameters is not None
    values = read_trained(folder / source)
    np.testing.assert_array_equal(trained.table.flatten(values.tensors), trained.parameters)


def test_a_checkpoint_becomes_a_version_from_which_the_run_continues(
    fanin: Fanin, folder: Path, site: Site, trained: TrainResult
) -> None:
    words = ("publish", folder / "checkpoints", "--run", "run", "--key", folder / "publisher.key")
    coordinator = ("--state", site.state)
    error = one_line(fanin(*words, *coordinator), "publish")
    assert error == "run run: a round is open; publish when the run rests, or pause it"
    assert fanin("pause", "run", *coordinator).status == 0
    outcome = fanin(*words, "--rounds", "1", *coordinator, "--json")
    assert outcome.status == 0, outcome
    row = json.loads(outcome.out)
    assert (row["version"], row["source"]) == (1, str(folder / "checkpoints" / "step-00000004"))
    with site.operator() as operator:
        np.testing.assert_array_equal(operator.parameters(operator.version("run", 1).version), trained.parameters)
        for index in range(f.NUM_DEVICES):
            site.device(index)
        last = list(operator.watch("run"))[-1]
    assert isinstance(last.event, RunRested)
    published = [entry.event.number for entry in site.events() if isinstance(entry.event, VersionPublished)]
    assert published == [1, 2], "the Round that began from the published Version"


def test_the_page_trains_on_from_a_version_and_publishes_the_result(
    fanin: Fanin, folder: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the blocks of the page in their order: ``fanin fetch``, a program, ``fanin publish``."""
    # It has finished if the devices of another test took part in it.
    fanin("pause", "run", "--state", site.state)
    with site.operator() as operator:
        before = operator.run("run").version
    program = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    fetch, publish = re.findall(r"^fanin ((?:fetch|publish) .*)$", PAGE, re.MULTILINE)
    (folder / "round").mkdir()
    monkeypatch.chdir(folder / "round")
    Path("continue.toml").write_text(
        f"""
        model.app = "fanin.datacenter.models.digits_app:app"
        data = {{ examples = "{folder / "data.npz"}", held_fraction = 0.2 }}
        training = {{ batch_size = 16, learning_rate = 0.05 }}
        stop.steps = 2
        """
    )
    shutil.copy(folder / "publisher.key", "publisher.key")
    assert fanin(*fetch.replace("digits", "run").split(), "--state", site.state).status == 0
    scope: dict[str, object] = {}
    exec(program, scope)
    outcome = fanin(*publish.replace("digits", "run").split(), "--state", site.state)
    text = f"version {before + 1} of run run published from job/parameters.bin; the run is running\n"
    assert (outcome.status, outcome.out) == (0, text), outcome
    result = scope["result"]
    assert isinstance(result, TrainResult)
    with site.operator() as operator:
        version = operator.version("run", before + 1).version
        np.testing.assert_array_equal(operator.parameters(version), result.parameters)
    assert fanin("stop", "run", "--state", site.state).status == 0


def test_int8_must_keep_up_on_the_data_of_the_caller(fanin: Fanin, folder: Path, site: Site, tmp_path: Path) -> None:
    values = read_trained(folder / "job").tensors
    # The activations exceed the range for which the int8 graph was calibrated.
    np.savez(tmp_path / "large.npz", **{name: 30 * each for name, each in values.items()})
    options = ("--run", "digits", "--key", folder / "publisher.key", "--data", folder / "data.npz")
    # It has finished if the devices of another test took part in it.
    fanin("pause", "digits", "--state", site.state)
    error = one_line(fanin("publish", tmp_path / "large.npz", *options, "--state", site.state), "publish")
    assert error.startswith("the version that was trained: int8 is ")
    np.savez(tmp_path / "other.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, np.int32))
    wrong = (*options[:-1], tmp_path / "other.npz")
    error = one_line(fanin("publish", folder / "job", *wrong, "--state", site.state), "publish")
    assert error == (
        "examples: x: got float32 (4, 3), expected float32 (n, 1, 8, 8); pass examples of the run's model 'digits'"
    )
    outcome = fanin("publish", folder / "job", *options, "--max-int8-drop", "5", "--state", site.state)
    assert re.match(r"version \d of run digits published from .*parameters.bin; the run is ", outcome.out), outcome


def test_a_checkpoint_of_other_tensors_too_has_the_values_that_train(tmp_path: Path) -> None:
    (tmp_path / "norm.py").write_text(NORM_APP)
    config = config_in(tmp_path, f"{tmp_path / 'norm.py'}:app", MeshShape())
    (tmp_path / "weights").mkdir()
    result = train_rank(config)
    assert result.table is not None
    shapes = {spec.name: spec.shape for spec in result.table.specs}
    assert {"1.weight", "2.running_mean"} < shapes.keys() and "3.weight" not in shapes
    manifest = synthetic_bundle(tmp_path / "bundle", f.PUBLISHER, shapes).manifest
    values = read_trained(tmp_path / "checkpoints")
    assert {"3.weight", "scale"} <= values.aside
    np.testing.assert_array_equal(vector_for(manifest, values), result.parameters)
    # Weights have all parameters, and no running statistics.
    with pytest.raises(InvalidInput, match="FN-1315"):
        vector_for(manifest, read_trained(tmp_path / "weights"))


def test_a_checkpoint_becomes_a_bundle(fanin: Fanin, folder: Path, trained: TrainResult, tmp_path: Path) -> None:
    words = ("export", "fanin.datacenter.models.digits_app:app", "--out", tmp_path / "bundle", "--format", "onnx")
    outcome = fanin(*words, "--key", folder / "publisher.key", "--parameters", folder / "checkpoints", "--quiet")
    assert outcome.status == 0, outcome
    bundle = open_folder(tmp_path / "bundle", trusted=(f.PUBLISHER.public,))
    np.testing.assert_array_equal(bundle.initial_parameters(), trained.parameters)


def damaged(folder: Path, copy: Path) -> Path:
    """Return a copy of the checkpoints in which one bit of a rank's file is another."""
    shutil.copytree(folder / "checkpoints", copy)
    path = sorted((copy / "step-00000004").glob("__*"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return copy


def test_each_mistake_has_one_clear_error_and_publishes_nothing(
    fanin: Fanin, folder: Path, site: Site, tmp_path: Path
) -> None:
    (tmp_path / "stranger.key").write_text(SigningKey(bytes(range(1, 33))).private_bytes().hex())
    (tmp_path / "other.py").write_text(OTHER_APP)
    other = config_in(tmp_path, f"{tmp_path / 'other.py'}:app", MeshShape())
    train_rank(replace(other, checkpoints=replace(other.checkpoints, weights=None)))
    weights = load_file(folder / "weights/model.safetensors")
    name = min(weights)
    save_file({**weights, name: weights[name][:1]}, tmp_path / "shape.safetensors")
    save_file({**weights, name: np.full_like(weights[name], np.nan)}, tmp_path / "nan.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((folder / "weights/model.safetensors").read_bytes()[:-9])
    (tmp_path / "cut.bin").write_bytes((folder / "job/parameters.bin").read_bytes()[:-9])
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / "checkpoints", tmp_path / "unmarked")
    (tmp_path / "unmarked/LATEST").unlink()
    checkpoints = folder / "checkpoints"
    with site.operator() as operator:
        before = operator.run("run").version

    def error(source: Path, run: str = "run", key: Path = folder / "publisher.key", *options: object) -> str:
        words = ("publish", source, "--run", run, "--key", key, "--state", site.state)
        return one_line(fanin(*words, *options), "publish").replace(f"{tmp_path}/", "").replace(f"{folder}/", "")

    not_finite = "got 16 values that are not finite, expected finite ones; name an earlier checkpoint"
    expected = "expected the parameters of the run's model 'synthetic'; name the checkpoints of a job that"
    for text, message in (
        (error(checkpoints, "walk"), "run 'walk': not found on this coordinator; fanin runs lists its runs"),
        (
            error(checkpoints, "run", tmp_path / "no.key"),
            "--key no.key: no such file, expected the key",
        ),
        (
            error(checkpoints, "run", tmp_path / "stranger.key"),
            "run run: got the key 79b5562e.., expected 03a107bf",
        ),
        (
            error(tmp_path / "checkpoints"),
            "got 2 tensors: 2 unknown to the model, 6 missing, such as 1.b",
        ),
        (error(tmp_path / "checkpoints"), expected),
        (
            error(tmp_path / "shape.safetensors"),
            f"1 of another shape, such as {name}: got [1], expected [16]",
        ),
        (error(tmp_path / "nan.safetensors"), f"nan.safetensors: {not_finite}"),
        (
            error(damaged(folder, tmp_path / "damaged")),
            "damaged/step-00000004/__0_0.distcp: digest mismatch: ",
        ),
        (error(tmp_path / "cut.safetensors"), "cut.safetensors: not a complete safetensors file ("),
        (error(tmp_path / "cut.bin"), "cut.bin: parameters: got 79775 bytes of values, expected 79784"),
        (
            error(tmp_path / "empty"),
            "empty: got a folder without parameters, expected checkpoints or ",
        ),
        (
            error(tmp_path / "unmarked"),
            "got checkpoints without LATEST, which names the newest complete",
        ),
        (error(tmp_path / "none"), "none: cannot be read (No such file or directory)"),
    ):
        assert message in text
    assert (
        usage_line(fanin("publish", checkpoints, "--run", "run", "--max-int8-drop", "1"), "publish")
        == "--max-int8-drop: expected --data FILE.npz with it"
    )
    with site.operator() as operator:
        assert operator.run("run").version == before
