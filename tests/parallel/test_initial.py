"""A job of several ranks starts without values, from one file that its first rank writes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.full_disk import full_disk, in_child
from torch import nn

from fanin.datacenter.checkpoints.progress import MARKER
from fanin.datacenter.checkpoints.seeds import is_seed_file, write_seed_file
from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.families.known import family_model
from fanin.datacenter.files.jobfiles import SEED_FILE
from fanin.datacenter.jobs.initial import initial_values
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.models.encoder import Encoder, EncoderConfig
from fanin.datacenter.models.seeding import seeded
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.datacenter.parallel.transforms.meta import drop_values, is_on_meta, materialize, parameters_on_meta
from fanin.datacenter.training.model import JobModel, Start, build_job_model, load_rank_app
from fanin.edge.export.app.app import App
from fanin.edge.export.app.optimizers.recipe import Adapters, Recipe
from fanin.protos.errors import InvalidInput, StorageFull

SIZES = DecoderConfig(vocabulary=11, width=16, num_layers=2, num_heads=2, num_kv_heads=1, feed_forward=8)
CPU = torch.device("cpu")


def layered() -> nn.Module:
    """Return a module that torch's rules initialize, with a replaced layer, converted to float64."""
    with seeded(5):
        module = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 4), nn.Conv1d(4, 2, 3), nn.BatchNorm1d(2))
        module[2] = nn.Conv1d(4, 3, 2)
        return module.double()


class Empty(nn.Module):
    """A parameter without values, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.one = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(()))


class Complex(nn.Module):
    """A parameter with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "decoder": partial(Decoder, SIZES, 3),
    "tied": partial(Decoder, replace(SIZES, tied=True), 3),
    "encoder": partial(Encoder, EncoderConfig(vocabulary=11, context=8, width=8, num_heads=2, feed_forward=8), 3),
    "layers": layered,
    "empty": Empty,
}


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("name", BUILDERS)
def test_seed_file_has_the_values_of_one_process(name: str, repeatable: bool, tmp_path: Path) -> None:
    path, expected = tmp_path / SEED_FILE, dict(BUILDERS[name]().named_parameters())
    write_seed_file(path, Start(build=BUILDERS[name], repeatable=repeatable), "digest")
    tensors = load_file(path)
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert is_seed_file(path, "digest")
    assert list(tmp_path.iterdir()) == [path]


def test_seed_file_is_initialized_in_the_file_itself(tmp_path: Path) -> None:
    """The process never holds the values in its memory: the model initializes each parameter inside the file."""
    flags = list[bool]()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            if not self.weight.is_meta:
                rows = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
                ranges = [row[0].split("-") for row in rows if row[-1].endswith(".new")]
                address = self.weight.data_ptr()
                flags.append(any(int(start, 16) <= address < int(end, 16) for start, end in ranges))
            nn.init.ones_(self.weight)

    write_seed_file(tmp_path / SEED_FILE, Start(build=Watched, repeatable=True), "digest")
    assert flags == [True]


def test_interrupted_writing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / SEED_FILE
    calls = list[None]()

    def build() -> nn.Module:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return nn.Linear(2, 2)

    with pytest.raises(KeyboardInterrupt):
        write_seed_file(path, Start(build=build, repeatable=True), "digest")
    assert not list(tmp_path.iterdir())
    # A killed rank leaves its draft, which the next rank removes.
    (tmp_path / f"{SEED_FILE}.host-1.new").write_bytes(b"half")
    assert not is_seed_file(path, "digest")
    write_seed_file(path, Start(build=lambda: nn.Linear(2, 2), repeatable=True), "digest")
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_reported_before_a_value_is_written(tmp_path: Path) -> None:
    def work() -> None:
        with full_disk(4096), pytest.raises(StorageFull, match="initial parameters could not be written"):
            write_seed_file(tmp_path / SEED_FILE, Start(build=lambda: nn.Linear(64, 64), repeatable=True), "digest")

    in_child(work)
    assert not list(tmp_path.iterdir())


def test_dtypes_that_the_format_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-1319"):
        write_seed_file(tmp_path / SEED_FILE, Start(build=Complex, repeatable=True), "digest")


@pytest.mark.parametrize("metadata", [{"fanin_seed_sha256": "other"}, None])
def test_seed_file_of_another_job_is_refused(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    path = tmp_path / SEED_FILE
    save_file({"weight": torch.zeros(2)}, path, metadata)
    with pytest.raises(InvalidInput, match="FN-1322"):
        is_seed_file(path, "digest")


def test_damaged_seed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / SEED_FILE
    write_seed_file(path, Start(build=lambda: nn.Linear(2, 2), repeatable=True), "digest")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="FN-1313"):
        is_seed_file(path, "digest")


class Buffered(nn.Module):
    """Two names for one parameter, a frozen one, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.norm = nn.BatchNorm1d(3)


@pytest.mark.parametrize("on_meta", [True, False])
def test_module_without_values_keeps_ties_buffers_and_frozen_parameters(on_meta: bool) -> None:
    if on_meta:
        with parameters_on_meta():
            module = Buffered()
    else:
        module = Buffered()
        drop_values(module)
    assert all(value.is_meta for value in module.parameters())
    assert module.second.weight is module.first.weight
    assert not is_on_meta(nn.Linear(2, 2)), "the hook is gone"
    materialize(module, CPU)
    assert not is_on_meta(module)
    assert module.second.weight is module.first.weight
    assert [value.requires_grad for value in module.parameters()] == [True, True, False, True, True]
    assert torch.equal(module.table, torch.arange(3.0))
    assert bool((module.norm.running_var == 1).all())


def job(folder: Path, **model: object) -> TrainConfig:
    text = folder.parent / f"{folder.name}.txt"
    text.write_text("abcdefgh" * 20)
    return TrainConfig(
        model=ModelSettings(**({"family": family_model("decoder", SIZES)} | model)),
        data=DataSettings(text=str(text), length=4),
        training=TrainingSettings(batch_size=2, learning_rate=0.1),
        stop=StopSettings(steps=1),
        seed=3,
    )


def rank_model(config: TrainConfig) -> JobModel:
    return build_job_model(config, num_ranks=2)


def test_restarted_job_uses_its_seed_file_again(tmp_path: Path) -> None:
    config = job(tmp_path)
    assert is_on_meta(rank_model(config).model.module)
    values = initial_values(config, rank_model(config), 2, tmp_path)
    assert values.path == tmp_path / SEED_FILE
    before = values.path.stat().st_ino
    restarted_job = replace(config, stop=StopSettings(steps=2), training=replace(config.training, learning_rate=0.2))
    assert initial_values(restarted_job, rank_model(restarted_job), 2, tmp_path) == values
    assert values.path.stat().st_ino == before


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"model": ModelSettings(family=family_model("decoder", replace(SIZES, num_layers=1)))}]
)
def test_seed_file_is_bound_to_model_and_seed(change: dict[str, object], tmp_path: Path) -> None:
    config = job(tmp_path)
    initial_values(config, rank_model(config), 2, tmp_path)
    other_job = replace(config, **change)
    with pytest.raises(InvalidInput, match="FN-1322"):
        initial_values(other_job, rank_model(other_job), 2, tmp_path)


def test_seed_file_is_bound_to_the_release_of_torch(tmp_path: Path) -> None:
    config = job(tmp_path)
    initial_values(config, rank_model(config), 2, tmp_path)

    def resume_with_another_release() -> None:
        # Another release may draw other numbers from the same seed.
        torch.__version__ = "2.0.0"
        with pytest.raises(InvalidInput, match="FN-1322"):
            initial_values(config, rank_model(config), 2, tmp_path)

    in_child(resume_with_another_release)


def test_checkpoint_has_precedence_over_the_seed_file(tmp_path: Path) -> None:
    config, checkpoints = job(tmp_path), tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / MARKER).touch()
    for settings in (
        replace(config.checkpoints, folder=checkpoints),
        replace(config.checkpoints, resume=checkpoints),
    ):
        resumed_job = replace(config, checkpoints=settings)
        assert initial_values(resumed_job, rank_model(resumed_job), 2, tmp_path).path is None
    assert not (tmp_path / SEED_FILE).exists()


def test_weights_have_precedence_over_a_seed(tmp_path: Path) -> None:
    config = job(tmp_path, initial=tmp_path / "weights.safetensors")
    assert initial_values(config, rank_model(config), 2, tmp_path).path == tmp_path / "weights.safetensors"
    assert not (tmp_path / SEED_FILE).exists()


def test_several_ranks_need_a_folder(tmp_path: Path) -> None:
    config = job(tmp_path)
    with pytest.raises(InvalidInput, match="FN-1320"):
        initial_values(config, rank_model(config), 2, None)


def app_of(module: nn.Module, recipe: Recipe | None = None) -> App:
    x = torch.rand(4, 3)
    return App(name="net", module=module, calibration=x, batch_size=2, num_classes=3, recipe=recipe or Recipe())


class Attribute(nn.Module):
    """A module with a random tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.noise = torch.rand(3)


TEACHERS = list[nn.Module]()


def plain() -> App:
    """Return an App whose function replaces a layer of its module."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[1] = nn.Linear(3, 3)
    return app_of(module)


def computing() -> App:
    """Return an App whose function needs the values."""
    module = nn.Linear(3, 3)
    assert float(module.weight.abs().sum()) > 0
    return app_of(module)


def attribute() -> App:
    """Return an App that draws a tensor after the parameters."""
    return app_of(Attribute())


def teaching() -> App:
    """Return an App whose function keeps another module."""
    TEACHERS.append(nn.Linear(3, 3))
    return app_of(nn.Linear(3, 3))


def adapted() -> App:
    """Return an App that trains only adapters."""
    return app_of(nn.Linear(3, 3), Recipe(trains=Adapters(rank=1)))


def copying() -> App:
    """Return an App with a buffer that is computed from a parameter."""
    module = nn.Linear(3, 3)
    module.register_buffer("first", module.weight.detach().clone())
    return app_of(module)


def random_buffer() -> App:
    """Return an App with a random buffer. It has no seed, so each rank draws other numbers."""
    module = nn.Linear(3, 3)
    module.register_buffer("noise", torch.rand(3))
    return app_of(module)


@pytest.fixture
def cleared_teachers() -> Iterator[None]:
    yield
    TEACHERS.clear()


@pytest.mark.usefixtures("cleared_teachers")
@pytest.mark.parametrize(
    ("name", "on_meta"),
    [
        ("plain", True),
        ("computing", False),
        ("attribute", False),
        ("teaching", False),
        ("adapted", False),
        ("copying", False),
    ],
)
def test_app_is_built_without_values_if_its_function_needs_none(name: str, on_meta: bool) -> None:
    app = load_rank_app(f"{__name__}:{name}", with_values=False)
    assert is_on_meta(app.module) == on_meta
    assert not any(is_on_meta(teacher) for teacher in TEACHERS[1:])
    assert not is_on_meta(load_rank_app(f"{__name__}:{name}", with_values=True).module)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_keeps_the_values_of_an_app(rank: int, tmp_path: Path) -> None:
    examples = tmp_path / "examples.npz"
    np.savez(examples, x=np.zeros((4, 3), np.float32), y=np.arange(4) % 3)
    config = replace(
        job(tmp_path), model=ModelSettings(app=f"{__name__}:random_buffer"), data=DataSettings(examples=examples)
    )
    model = build_job_model(config, rank=rank, num_ranks=2)
    assert is_on_meta(model.model.module) == (rank > 0)
    if rank == 0:
        expected = {name: value.detach().clone() for name, value in model.model.module.named_parameters()}
        values = initial_values(config, model, 2, tmp_path)
        assert values.path is not None
        tensors = load_file(values.path)
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert model.app is not None
    assert all(value.is_meta for value in (*model.model.module.parameters(), *model.app.module.parameters()))
    assert not any(value.is_meta for value in model.model.module.buffers())
