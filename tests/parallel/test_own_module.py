"""A user's own module trains on a mesh as in one process, and its weights become a Bundle."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from fanin.commands.main import main
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    LayoutSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import PARAMETERS_FILE, SEED_FILE, write_result
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.parallel.objective import ScoredObjective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model
from fanin.edge.bundles.bundle import open_folder
from fanin.protos.errors import FaninError, InvalidInput

pytestmark = pytest.mark.usefixtures("forked_agents")

APPS = Path(__file__).with_name("apps.py")
LAYOUT = LayoutSettings(
    layers="layers",
    num_layers=2,
    inputs=("embed",),
    outputs=("norm", "head"),
    plan={
        "embed": "vocabulary",
        "layers.*.perceptron": "shared",
        "layers.*.perceptron.up": "column",
        "layers.*.perceptron.down": "row",
        "head": "logits",
    },
    feed_forward=16,
    tied=("head.weight", "embed.weight"),
    sequence="model",
)


def config_of(folder: Path, app: str, mesh: str = "none") -> TrainConfig:
    tokens = np.random.default_rng(0).integers(0, 12, (20, 5)).astype(np.int32)
    np.savez(folder / "tokens.npz", x=tokens[:, :-1], y=tokens[:, 1:])
    shape = MeshShape.parse(mesh)
    return TrainConfig(
        model=ModelSettings(app=f"{APPS}:{app}", layout=LAYOUT),
        data=DataSettings(examples=folder / "tokens.npz"),
        training=TrainingSettings(batch_size=8, learning_rate=0.05),
        stop=StopSettings(steps=5),
        parallel=ParallelSettings(
            mesh=shape, schedule="GPipe", microbatches=2 if shape.pp > 1 else 1, sequence_parallel=shape.tp > 1
        ),
        checkpoints=CheckpointSettings(weights=folder / "weights.safetensors"),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp_shard=2,tp=2"])
def test_module_with_tied_weights_and_split_sequences_has_the_numbers_of_one_process(mesh: str, tmp_path: Path) -> None:
    results, weights = [], []
    folder = tmp_path / "job"
    for name in ("none", mesh):
        config = config_of(tmp_path, "tied_double", name)
        num_ranks = config.parallel.mesh.num_ranks
        results.append(train_rank(config) if num_ranks == 1 else launch(config, num_ranks, folder))
        weights.append(load_file(tmp_path / "weights.safetensors"))
    assert not (folder / SEED_FILE).exists(), "a job that is complete leaves none"
    np.testing.assert_allclose(*(result.metrics.trained.losses for result in results), rtol=0, atol=1e-10)
    assert "head.weight" not in weights[0]
    assert set(weights[0]) == set(weights[1])
    for name, value in weights[0].items():
        assert value.dtype == np.float64
        np.testing.assert_allclose(weights[1][name], value, rtol=0, atol=1e-10)


def test_trained_weights_become_a_bundle(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tied")
    (tmp_path / "job").mkdir()
    write_result(tmp_path / "job", train_rank(config))
    weights = load_file(tmp_path / "weights.safetensors")
    for index, source in enumerate((tmp_path / "weights.safetensors", tmp_path / "job" / PARAMETERS_FILE)):
        out = tmp_path / f"bundle-{index}"
        arguments = ["export", f"{APPS}:tied", "--out", str(out), "--key", str(tmp_path / "key"), "--format", "onnx"]
        assert main([*arguments, "--parameters", str(source), "--quiet"]) == 0
        bundle = open_folder(out, trusted=[(tmp_path / "key.pub").read_text().strip()])
        views = bundle.manifest.table.views(bundle.initial_parameters())
        assert set(views) == set(weights)
        assert all((views[name] == value).all() for name, value in weights.items())


@pytest.mark.parametrize(
    ("app", "tensors", "reason"),
    [
        ("tied", {"embed.weight": torch.zeros(3)}, "weights.safetensors: got 1 tensor: 1 of another shape or type"),
        ("adapted", {}, "--parameters: got an App that trains .*, expected 'full'"),
        ("normed", {}, "for an App with running statistics, which the file does not have"),
    ],
)
def test_weights_of_another_app_are_refused(
    app: str, tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    arguments = ["export", f"{APPS}:{app}", "--out", str(tmp_path / "out"), "--key", str(tmp_path / "key")]
    assert main([*arguments, "--parameters", str(path), "--quiet"]) != 0
    assert_matches(reason, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def assert_matches(pattern: str, text: str) -> None:
    """Search the text after joining the lines that the terminal wraps."""
    assert re.search(pattern, " ".join(text.split())), text


def objective_of(folder: Path, app: str, y: np.ndarray) -> ScoredObjective:
    np.savez(folder / "data.npz", x=np.random.default_rng(0).random((20, 2, 4), np.float32), y=y)
    job = build_job_model(
        TrainConfig(
            model=ModelSettings(app=f"{APPS}:{app}"),
            data=DataSettings(examples=folder / "data.npz"),
            training=TrainingSettings(batch_size=8, learning_rate=0.05),
            stop=StopSettings(steps=1),
        )
    )
    return job.scored


def test_the_accuracy_is_that_of_the_classes_in_the_axis_of_the_app(tmp_path: Path) -> None:
    scored = objective_of(tmp_path, "classes_first", np.zeros((20, 4), np.int32))
    outputs = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 1]]), 3).movedim(-1, 1).float()
    targets = torch.tensor([[0, 1, 0, -1]])
    assert scored.score(scored.objective.predict(outputs), targets).tolist() == [2.0, 3.0]


def test_outputs_that_are_not_the_classes_of_the_app_are_refused(tmp_path: Path) -> None:
    scored = objective_of(tmp_path, "classes_first", np.zeros((20, 4), np.int32))
    targets = torch.tensor([[0, 1, 2, -1]])
    with pytest.raises(FaninError, match="FN-0738"):
        scored.objective.loss_sum(torch.zeros(1, 2, 4), targets)


def test_counts_have_no_accuracy(tmp_path: Path) -> None:
    counts = np.ones((20, 3, 4), np.int32)
    scored = objective_of(tmp_path, "counted", counts)
    outputs, targets = torch.ones(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.int64)
    assert scored.score(scored.objective.predict(outputs), targets).tolist() == [0.0, 0.0]
    assert scored.objective.loss_sum(outputs, targets).item() == pytest.approx(2 * (np.e - 1))
    with pytest.raises(InvalidInput, match="FN-0856"):
        objective_of(tmp_path, "counted", counts.astype(np.float32))


@pytest.mark.parametrize("tied", [("head.weight", "norm.weight"), ("missing", "embed.weight")])
def test_names_of_two_parameters_are_not_tied(tied: tuple[str, str], tmp_path: Path) -> None:
    config = config_of(tmp_path, "tied")
    wrong_config = replace(config, model=replace(config.model, layout=replace(LAYOUT, tied=tied)))
    with pytest.raises(InvalidInput, match="FN-1285"):
        build_job_model(wrong_config)


def test_one_name_is_no_tie() -> None:
    with pytest.raises(InvalidInput, match="FN-1285"):
        replace(LAYOUT, tied=("head.weight",))
