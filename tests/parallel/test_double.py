"""A job with precision ``double`` computes in float64, from its first value to its last file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fanin.datacenter.config.settings import CheckpointSettings
from fanin.datacenter.config.train_config import TrainConfig, parse_config
from fanin.datacenter.files.jobfiles import SEED_FILE, TrainResult
from fanin.datacenter.jobs.initial import initial_values
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.observers.loading import RankPlace
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model
from fanin.protos.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("forked_agents")

APPS = Path(__file__).with_name("apps.py")
TOLERANCE = 1e-10
MODELS = {
    "decoder": """
[model.decoder]
vocabulary = 16
width = 16
num_layers = 2
num_heads = 2
num_kv_heads = 2
feed_forward = 16
""",
    "encoder": """
[model.encoder]
vocabulary = 16
context = 16
width = 16
num_layers = 2
num_heads = 2
feed_forward = 16
""",
    "app": f"""
[model]
app = "{APPS}:stacked"
""",
}
REST = """
[training]
batch_size = 8
learning_rate = 0.02
clip_norm = 1.0
[stop]
steps = 4
[parallel]
precision = "double"
[checkpoints]
folder = "{folder}/checkpoints"
every = 2
weights = "{folder}/weights.safetensors"
[watch]
traffic = true
"""


def config_of(folder: Path, name: str, mesh: str = "none") -> TrainConfig:
    """Return a job that keeps its files in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "app":
        generator = np.random.default_rng(0)
        images, labels = generator.random((24, 1, 8, 8), np.float32), generator.integers(0, 10, 24).astype(np.int32)
        np.savez(folder / "data.npz", x=images, y=labels)
        data = f'[data]\nexamples = "{folder}/data.npz"\n'
    else:
        (folder / "data.txt").write_text("the cat sat on the mat. " * 20)
        data = f'[data]\ntext = "{folder}/data.txt"\nlength = 16\n'
    config = parse_config(MODELS[name] + data + REST.format(folder=folder), name)
    return replace(config, parallel=replace(config.parallel, mesh=MeshShape.parse(mesh)))


def losses(result: TrainResult) -> tuple[float, ...]:
    return result.metrics.trained.losses


def assert_same(first: Path, second: Path) -> None:
    """Assert that two files have the same float64 values, to ``TOLERANCE``."""
    weights, others = load_file(first), load_file(second)
    assert set(weights) == set(others)
    for name, value in weights.items():
        assert value.dtype == others[name].dtype == np.float64
        np.testing.assert_allclose(others[name], value, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("decoder", "dp_shard=2"),
        pytest.param("decoder", "tp=2", marks=pytest.mark.nightly),
        pytest.param("encoder", "tp=2", marks=pytest.mark.nightly),
        pytest.param("app", "dp_replicate=2", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_have_the_numbers_of_one_process(name: str, mesh: str, tmp_path: Path) -> None:
    reference = train_rank(config_of(tmp_path / "one", name), RankPlace(folder=tmp_path / "one"))
    result = launch(config_of(tmp_path / "two", name, mesh), 2, tmp_path / "two")
    np.testing.assert_allclose(losses(result), losses(reference), rtol=0, atol=TOLERANCE)
    assert_same(tmp_path / "one" / "weights.safetensors", tmp_path / "two" / "weights.safetensors")
    if name == "decoder":
        assert result.metrics.bytes_by_axis == result.metrics.predicted_bytes_by_axis


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_job_has_the_bits_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / "whole", name)
    reference = train_rank(config)
    resumed_config = config_of(tmp_path / "cut", name)
    train_rank(replace(resumed_config, stop=replace(resumed_config.stop, steps=2)))
    result = train_rank(resumed_config)
    assert losses(result) == losses(reference)
    weights, others = (load_file(tmp_path / each / "weights.safetensors") for each in ("whole", "cut"))
    assert all(value.dtype == np.float64 and (others[key] == value).all() for key, value in weights.items())
    # A value in float64 that float32 cannot hold: nothing was rounded.
    assert any((value != value.astype(np.float32)).any() for value in weights.values())


def test_a_checkpoint_of_another_precision_is_converted(tmp_path: Path) -> None:
    config = config_of(tmp_path, "decoder")
    full_config = replace(
        config, parallel=replace(config.parallel, precision="full"), stop=replace(config.stop, steps=2)
    )
    first_losses = losses(train_rank(full_config))
    all_losses = losses(train_rank(config))
    assert all_losses[:2] == first_losses
    assert len(all_losses) == 4
    weights = load_file(tmp_path / "weights.safetensors")
    assert all(value.dtype == np.float64 for value in weights.values())


@pytest.mark.parametrize("name", MODELS)
def test_seed_file_has_the_values_of_one_process_in_float64(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, name, "dp_shard=2")
    reference = build_job_model(config).model.module
    initial_values(config, build_job_model(config, num_ranks=2), 2, tmp_path)
    tensors = load_file(tmp_path / SEED_FILE)
    for key, value in reference.named_parameters():
        assert tensors[key].dtype == np.float64
        assert (tensors[key] == value.detach().numpy()).all()
    full_config = replace(config, parallel=replace(config.parallel, precision="full"))
    with pytest.raises(InvalidInput, match="FN-1322"):
        initial_values(full_config, build_job_model(full_config, num_ranks=2), 2, tmp_path)


def test_initial_weights_in_float32_are_converted(tmp_path: Path) -> None:
    config = config_of(tmp_path, "decoder")
    values = {key: value.detach().numpy() for key, value in build_job_model(config).model.module.named_parameters()}
    save_file({key: value.astype(np.float32) for key, value in values.items()}, tmp_path / "initial.safetensors")
    initial_config = replace(config, model=replace(config.model, initial=tmp_path / "initial.safetensors"))
    no_checkpoints = CheckpointSettings()
    # The seed draws float32 values, so the file holds all of their bits.
    assert losses(train_rank(replace(initial_config, checkpoints=no_checkpoints))) == losses(
        train_rank(replace(config, checkpoints=no_checkpoints))
    )


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_hook_that_rounds_gradients_is_refused(hook: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, "app", "dp_replicate=2")
    with pytest.raises(InvalidInput, match=f"got hook '{hook}' and precision 'double', expected hook 'none' or"):
        replace(config, communication=replace(config.communication, hook=hook))


def test_dtype_of_a_pretrained_model_must_be_float64(tmp_path: Path) -> None:
    text = f'[model.pretrained]\nfolder = "{tmp_path}"\n[data]\ntext = "x"\nlength = 16\n' + REST.format(folder="/x")
    text = text.replace("weights.safetensors", "model.safetensors")
    with pytest.raises(InvalidInput, match="FN-1222"):
        parse_config(text, "train.toml")
    assert parse_config(text.replace("\n[data]", '\ndtype = "float64"\n[data]'), "train.toml")
