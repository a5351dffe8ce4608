"""The random numbers of a job are those of its seed, steps, examples and modules, on any mesh."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fanin.datacenter.checkpoints.progress import MARKER, folder_name
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LayoutSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import TrainingHistory
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.parallel.draws.sites import DrawShape, ModelDraws, Site
from fanin.datacenter.parallel.pipelines.stages import check_draws
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import load_rank_app
from fanin.protos.errors import FaninError, InvalidInput, UnsupportedModel

pytestmark = pytest.mark.usefixtures("forked_agents")

APPS = Path(__file__).with_name("drawing_apps.py")
SPLIT = LayoutSettings(
    inputs=("embed",),
    layers="layers",
    num_layers=2,
    outputs=("head",),
    plan={
        "head": "shared",
        "layers.*.attention": "shared",
        "layers.*.attention.query": "column",
        "layers.*.attention.key": "column",
        "layers.*.attention.value": "column",
        "layers.*.attention.out": "row",
        "layers.*.perceptron": "shared",
        "layers.*.perceptron.up": "column",
        "layers.*.perceptron.down": "row",
    },
    num_heads=4,
    num_kv_heads=4,
    feed_forward=32,
    sequence="layers",
)
UNSPLIT = replace(SPLIT, plan={"embed": "whole", "head.1": "logits"}, num_heads=0, num_kv_heads=0, feed_forward=0)
STACKED = LayoutSettings(layers="1.layers", num_layers=4, inputs=("0",), outputs=("2", "3"), plan={"3": "logits"})
NUM_STEPS = 20


def config_of(folder: Path, app: str = "fused", layout: LayoutSettings | None = SPLIT) -> TrainConfig:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 8, 16)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=(x.mean(1) @ rng.normal(size=(16, 4))).argmax(1).astype(np.int32))
    return TrainConfig(
        model=ModelSettings(app=f"{APPS}:{app}", layout=layout),
        data=DataSettings(examples=folder / "rows.npz"),
        training=TrainingSettings(batch_size=16, learning_rate=0.05, optimizer="sgd"),
        stop=StopSettings(steps=NUM_STEPS),
        parallel=ParallelSettings(precision="double"),
    )


def on_mesh(config: TrainConfig, mesh: str, folder: Path, **changes: object) -> TrainingHistory:
    shape = MeshShape.parse(mesh)
    parallel = replace(config.parallel, mesh=shape, **changes)  # type: ignore[arg-type]  # the values of one table
    return launch(replace(config, parallel=parallel), shape.num_ranks, folder).metrics.trained


def alone(config: TrainConfig) -> TrainingHistory:
    return train_rank(config).metrics.trained


def assert_equal(history: TrainingHistory, expected: TrainingHistory) -> None:
    assert len(history.losses) == len(expected.losses) == NUM_STEPS
    np.testing.assert_allclose(history.losses, expected.losses, rtol=0, atol=1e-10)
    losses = [each.validation_loss for each in history.evaluated]
    np.testing.assert_allclose(losses, [each.validation_loss for each in expected.evaluated], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "app", "changes"),
    [
        ("tp=2", "fused", {"sequence_parallel": True}),
        ("pp=2", "fused", {"microbatches": 2, "recompute": "selective"}),
        pytest.param("tp=2", "plain", {"recompute": "full"}, marks=pytest.mark.nightly),
        pytest.param("dp_replicate=2", "fused", {}, marks=pytest.mark.nightly),
        pytest.param("dp_shard=2", "plain", {"recompute": "full", "microbatches": 2}, marks=pytest.mark.nightly),
        pytest.param("dp_shard=2,tp=2", "plain", {}, marks=pytest.mark.nightly),
        pytest.param("pp=2", "plain", {"microbatches": 4, "recompute": "full"}, marks=pytest.mark.nightly),
    ],
)
def test_a_mesh_draws_the_numbers_of_one_process(
    mesh: str, app: str, changes: dict[str, object], tmp_path: Path
) -> None:
    config = config_of(tmp_path, app)
    assert_equal(on_mesh(config, mesh, tmp_path / "job", **changes), alone(config))


@pytest.mark.parametrize(
    ("mesh", "app", "layout", "changes"),
    [
        ("dp_replicate=2", "layerdrop", None, {}),
        ("pp=2", "embedded", STACKED, {"microbatches": 2}),
        pytest.param("dp_replicate=2", "keeping", None, {"recompute": "full"}, marks=pytest.mark.nightly),
        pytest.param("dp_shard=2", "layerdrop", None, {"microbatches": 2}, marks=pytest.mark.nightly),
        pytest.param("tp=2", "embedded", STACKED, {}, marks=pytest.mark.nightly),
        pytest.param(
            "pp=2",
            "embedded",
            STACKED,
            {"microbatches": 4, "schedule": "InterleavedZeroBubble"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_mesh_skips_the_layers_that_one_process_skips(
    mesh: str, app: str, layout: LayoutSettings | None, changes: dict[str, object], tmp_path: Path
) -> None:
    config = config_of(tmp_path, app, layout)
    assert_equal(on_mesh(config, mesh, tmp_path / "job", **changes), alone(config))


@pytest.mark.nightly
def test_copies_that_skip_layers_resume_with_the_numbers_of_an_uninterrupted_job(tmp_path: Path) -> None:
    config = config_of(tmp_path, "layerdrop", None)
    kept = replace(config, checkpoints=CheckpointSettings(folder=tmp_path / "kept"))
    on_mesh(replace(kept, stop=StopSettings(steps=7)), "dp_replicate=2", tmp_path / "job")
    losses = on_mesh(kept, "dp_replicate=2", tmp_path / "job").losses
    np.testing.assert_allclose(losses, alone(config).losses, rtol=0, atol=1e-10)


def test_a_first_stage_that_may_skip_all_of_its_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="FN-1280"):
        on_mesh(config_of(tmp_path, "skipping_first", UNSPLIT), "pp=2", tmp_path / "job", microbatches=2)


def test_one_process_repeats_its_draws_and_follows_its_seed(tmp_path: Path) -> None:
    config = config_of(tmp_path, "plain")
    reference = alone(config)
    torch.rand(3)
    assert alone(config).losses == reference.losses
    assert alone(replace(config, seed=1)).losses != reference.losses
    training = replace(config.training, accumulate=2)
    parallel = replace(config.parallel, microbatches=2, recompute="full")
    assert_equal(alone(replace(config, training=training, parallel=parallel)), reference)


def test_a_resumed_job_draws_the_numbers_of_an_uninterrupted_one(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), checkpoints=CheckpointSettings(folder=tmp_path / "kept"))
    alone(replace(config, stop=StopSettings(steps=7)))
    assert alone(config).losses == alone(replace(config, checkpoints=CheckpointSettings())).losses


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_draws_the_same_numbers(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert_equal(alone(replace(config, parallel=replace(config.parallel, compile=True))), alone(config))


def test_a_model_that_draws_in_evaluation_repeats_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "always", UNSPLIT)
    reference = alone(config)
    assert alone(config).evaluated == reference.evaluated
    assert_equal(alone(replace(config, parallel=replace(config.parallel, microbatches=2))), reference)


def test_a_model_that_needs_values_is_recorded_with_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, "branching", UNSPLIT)
    assert_equal(alone(replace(config, training=replace(config.training, accumulate=4))), alone(config))


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("python", "draws random numbers by Python's random in its forward or its loss, expected none"),
        ("numpy", "draws random numbers by numpy.random in its forward or its loss, expected none"),
        ("integers", "draws random numbers by aten.randint, expected dropout"),
        ("own_generator", "draws random numbers by aten.rand with a generator of its own"),
        ("pairs", r"layers.0 draws \[2, 2\] uniform values for 2 examples and \[3, 3\] for 3, expected one dimension"),
        ("sometimes", "draws random numbers by torch that are unknown before the first step, expected the same"),
    ],
)
def test_a_draw_that_no_mesh_can_repeat_is_refused(app: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        alone(config_of(tmp_path, app, UNSPLIT))


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("by_rank", "in training mode, with its random numbers, got the loss"),
        pytest.param("hidden", "got other values of layers.* on the ranks of tp", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_differ_in_training_end_the_job(app: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FaninError, match=message):
        on_mesh(config_of(tmp_path, app, UNSPLIT), "tp=2", tmp_path / "job")


def test_copies_that_differ_end_the_job_before_a_checkpoint_stores_one_of_them(tmp_path: Path) -> None:
    config = replace(
        config_of(tmp_path, "drifting", UNSPLIT),
        checkpoints=CheckpointSettings(folder=tmp_path / "kept", every=2),
        evaluation=EvaluationSettings(every=10),
    )
    message = (
        r"got other values of layers\.\d\.bias on the ranks of dp_replicate \(they differ by 0\..* explains 0.001\)"
    )
    with pytest.raises(UnsupportedModel, match=message):
        on_mesh(config, "dp_replicate=2", tmp_path / "job")
    assert folder_name(2) in (tmp_path / "kept" / MARKER).read_text()


def test_copies_of_a_bias_near_zero_may_differ_by_rounding(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rounding", UNSPLIT)
    config = replace(config, training=replace(config.training, learning_rate=1e-7))
    assert len(on_mesh(config, "dp_replicate=2", tmp_path / "job").losses) == NUM_STEPS


def test_a_rank_without_values_draws_as_many_numbers_while_it_builds_an_app() -> None:
    numbers = []
    with torch.random.fork_rng(devices=[]):
        for with_values in (True, False):
            torch.manual_seed(5)
            app = load_rank_app(f"{APPS}:unseeded", with_values=with_values)
            assert next(app.module.parameters()).is_meta != with_values
            numbers.append(torch.rand(3).tolist())
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("layers.0.drop", "layers.1.drop"), "layers.0.drop and layers.1.drop are one module that draws"),
        (("",), "the forward of the model draws random numbers and is in none of embed, layers, head"),
    ],
)
def test_a_pipeline_refuses_draws_that_its_stages_would_repeat(names: tuple[str, ...], message: str) -> None:
    site = Site(names=names, train=(DrawShape(kind="uniform", shape=(1, 3), dim=0),))
    draws = ModelDraws(sites={names[0]: site})
    check_draws(draws, SPLIT.layout, 1, ())
    with pytest.raises(InvalidInput, match=message):
        check_draws(draws, SPLIT.layout, 2, ())
