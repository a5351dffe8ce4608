"""A mesh computes what its layout describes. If that differs from the App's module, the job does not start."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fanin.clients.data.digits import load_digits
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    LayoutSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("forked_agents")

APPS = Path(__file__).with_name("split_apps.py")
LAYOUT = LayoutSettings(
    layers="blocks",
    num_layers=2,
    inputs=("embed",),
    outputs=("pool", "head"),
    plan={
        "blocks.*.attention": "shared",
        "blocks.*.attention.query": "column",
        "blocks.*.attention.key": "column",
        "blocks.*.attention.value": "column",
        "blocks.*.attention.out": "row",
    },
    num_heads=4,
    num_kv_heads=4,
)


def config_of(folder: Path, app: str, mesh: str, layout: LayoutSettings = LAYOUT) -> TrainConfig:
    digits = load_digits()
    np.savez(folder / "rows.npz", x=digits.inputs["x"][:100].reshape(-1, 8, 8), y=digits.y[:100])
    return TrainConfig(
        model=ModelSettings(app=f"{APPS}:{app}", layout=layout),
        data=DataSettings(examples=folder / "rows.npz"),
        training=TrainingSettings(batch_size=8, learning_rate=0.01),
        stop=StopSettings(steps=3),
        parallel=ParallelSettings(mesh=MeshShape.parse(mesh), microbatches=2 if "pp" in mesh else 1),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "pp=2,tp=2", "dp_shard=2,tp=2"])
def test_a_module_that_its_layout_describes_trains_as_in_one_process(mesh: str, tmp_path: Path) -> None:
    reference = train_rank(config_of(tmp_path, "rows", "none"))
    result = launch(config_of(tmp_path, "rows", mesh), MeshShape.parse(mesh).num_ranks, tmp_path / "job")
    np.testing.assert_allclose(result.metrics.trained.losses, reference.metrics.trained.losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("app", "changes"),
    [
        ("lstm", {}),
        pytest.param("gru", {}, marks=pytest.mark.nightly),
        pytest.param("lstm", {"schedule": "GPipe"}, marks=pytest.mark.nightly),
    ],
)
def test_recurrent_layers_train_in_a_pipeline_as_in_one_process(
    app: str, changes: dict[str, str], tmp_path: Path
) -> None:
    layout = replace(LAYOUT, plan={})
    reference = train_rank(config_of(tmp_path, app, "none", layout))
    config = config_of(tmp_path, app, "pp=2", layout)
    config = replace(config, parallel=replace(config.parallel, **changes))  # type: ignore[arg-type]  # one table
    result = launch(config, 2, tmp_path / "job")
    np.testing.assert_allclose(result.metrics.trained.losses, reference.metrics.trained.losses, rtol=1e-5)


@pytest.mark.nightly
def test_a_module_that_draws_in_evaluation_is_not_compared(tmp_path: Path) -> None:
    result = launch(config_of(tmp_path, "noisy", "tp=2"), 2, tmp_path / "job")
    assert len(result.metrics.trained.losses) == 3


WITHOUT_ROWS = replace(LAYOUT, plan={name: style for name, style in LAYOUT.plan.items() if style != "row"})


@pytest.mark.parametrize(
    ("app", "mesh", "layout", "error"),
    [
        pytest.param(
            "fixed",
            "tp=2",
            LAYOUT,
            r"layout: for the same \d+ samples got the loss .* let the forward take the number of",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "rows",
            "tp=2",
            WITHOUT_ROWS,
            r"layout: on mesh tp=2 the forward fails \(.*\), but not in one process; correct",
            marks=pytest.mark.nightly,
        ),
        (
            "gained",
            "tp=2",
            LAYOUT,
            r"for the same 8 samples the gradient of blocks\.0\.attention\.gain and 1 more parameter .* is not split, ",
        ),
        (
            "odd",
            "tp=2",
            replace(LAYOUT, plan={"blocks.*": "shared", "blocks.*.up": "column", "blocks.*.down": "row"}),
            r"^tp: got blocks\.0\.up\.weight of \[15, 16\], whose 15 outputs .* and tp 2, expected a multiple",
        ),
        pytest.param(
            "odd",
            "tp=2",
            replace(LAYOUT, plan={"blocks.*.down": "row"}),
            r"^tp: got blocks\.0\.down\.weight of \[16, 15\], whose 15 inputs .* or remove the styles of this block",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "gained",
            "pp=2,tp=2",
            LAYOUT,
            r"layout: for the same 8 samples the gradient of blocks\.0\.attention\.gain and 1 more",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_module_that_a_mesh_would_train_as_another_is_refused(
    app: str, mesh: str, layout: LayoutSettings, error: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=error):
        launch(config_of(tmp_path, app, mesh, layout), MeshShape.parse(mesh).num_ranks, tmp_path / "job")


@pytest.mark.nightly
def test_the_failing_rank_is_reported_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    # The last stage fails, and the first one waits for it.
    config = config_of(tmp_path, "rows", "pp=2", replace(LAYOUT, outputs=("head",)))
    with pytest.raises(InvalidInput, match=r"the forward fails \(mat1 and mat2 shapes cannot .*; name every module"):
        launch(config, 2, tmp_path / "job")


@pytest.mark.nightly
def test_the_error_of_a_plan_without_gathers_names_sequence_parallel(tmp_path: Path) -> None:
    plan = {name: style for name, style in LAYOUT.plan.items() if style != "shared"}
    config = config_of(tmp_path, "rows", "tp=2", replace(LAYOUT, plan=plan, sequence="layers"))
    config = replace(config, parallel=replace(config.parallel, sequence_parallel=True))
    with pytest.raises(InvalidInput, match=r"the forward fails .* style shared .* or set sequence_parallel = false"):
        launch(config, 2, tmp_path / "job")


@pytest.mark.nightly
def test_a_job_that_resumes_on_another_mesh_is_compared(tmp_path: Path) -> None:
    checkpoints = CheckpointSettings(folder=tmp_path / "checkpoints")
    train_rank(replace(config_of(tmp_path, "scaled", "none"), checkpoints=checkpoints))
    config = replace(config_of(tmp_path, "scaled", "pp=2"), checkpoints=checkpoints, stop=StopSettings(steps=4))
    with pytest.raises(InvalidInput, match=r"for the same \d+ samples got the loss .* name every module of the forw"):
        launch(config, 2, tmp_path / "job")
