"""Four ranks agree on steps that are not finite, on parameters after an evaluation, and on shared parameters."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.programs import Programs
from parallel.quads import BROKEN, HALVES, NUM_RANKS, SPLIT, Shared
from torch import nn

from fanin.datacenter.config.settings import UNKNOWN_LAYOUT
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transforms.ties import check_shared, check_still_shared, shared_names, unshared
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import UnsupportedModel

AFTER = ("gathered", "written", "restored", "loaded")
TIED = ("embed.weight", "head.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """Return the folder with the results of ``quads.py``, which ran with warnings as errors."""
    made = tmp_path_factory.mktemp("quads")
    programs.check("quads", made)
    return made


def read(folder: Path, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}-{rank}.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("name", BROKEN)
def test_what_one_rank_finds_not_finite_all_ranks_skip(folder: Path, name: str) -> None:
    for rank in range(NUM_RANKS):
        found = read(folder, f"broken-{name}", rank)
        assert found["skipped"][:, 0].tolist() == [False, True, False]
        assert found["skipped"][:, 1].all(), "the losses themselves are finite"
        assert found["moved"].tolist() == [True, False, True]


@pytest.mark.parametrize("name", HALVES)
def test_an_evaluation_leaves_the_parameters_in_their_own_dtype(folder: Path, name: str) -> None:
    for rank in range(NUM_RANKS):
        same = dict(zip(AFTER, read(folder, f"half-{name}", rank)["same"], strict=True))
        assert all(same.values()), same


@pytest.mark.parametrize("name", ["dp_shard", "layers", "ddp"])
def test_shared_parameters_stay_one_on_copies_and_shards(folder: Path, name: str) -> None:
    alone = read(folder, "shared-alone")
    for rank in range(NUM_RANKS):
        found = read(folder, f"shared-{name}", rank)
        for key in alone:
            assert np.abs(found[key] - alone[key]).max() <= 1e-12, key


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_a_mesh_that_would_untie_parameters_is_refused(folder: Path, name: str) -> None:
    for rank in range(NUM_RANKS):
        told = str(read(folder, f"shared-{name}", rank)["told"])
        assert "got one parameter under the names embed.weight, head.weight, expected tp 1, and pp 1" in told


def test_shared_parameters_are_found_by_identity() -> None:
    module = Shared()
    assert shared_names(module) == (TIED, ("layers.0.weight", "layers.1.weight"))
    assert shared_names(nn.ModuleList([module.head, module.layers[0]])) == ()
    # A module that is used twice has each of its parameters once.
    layer = nn.Linear(2, 2)
    assert unshared([layer], nn.ModuleList([layer, layer])) == [layer]
    assert unshared([*module.layers, module.head], module) == []
    assert unshared([module.layers], module) == [module.layers]


def test_a_tie_of_two_names_does_not_cover_a_third_one() -> None:
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    module["b"].weight = module["a"].weight
    layout, stages = replace(UNKNOWN_LAYOUT, tied=("b.weight", "a.weight")), {f"{name}.weight": 0 for name in "abc"}
    check_shared(module, layout, MeshShape(tp=2), stages)
    module["c"].weight = module["a"].weight
    with pytest.raises(UnsupportedModel, match=r"under the names a\.weight, b\.weight, c\.weight, expected tp 1"):
        check_shared(module, layout, MeshShape(tp=2), stages)


def test_a_part_that_came_apart_is_told() -> None:
    module, parallel = Shared(), ParallelSettings()
    shared = shared_names(module)
    check_still_shared(module, shared)
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    with pytest.raises(
        UnsupportedModel, match=r"Shared: got two parameters for embed\.weight, head\.weight, which are"
    ):
        check_still_shared(module, shared)
    assert shared_names(module) == (("layers.0.weight", "layers.1.weight"),)
    engine = build_engine(
        TrainableModel(module=Shared(), layout=UNKNOWN_LAYOUT),
        parallel,
        TrainingSettings(batch_size=2, learning_rate=0.1),
        None,
    )
    assert len(engine.full_parameters()) == len(dict(module.named_parameters())) - 1


def test_another_value_in_the_place_of_a_parameter_is_told() -> None:
    training = TrainingSettings(batch_size=2, learning_rate=0.1)
    engine = build_engine(
        TrainableModel(module=nn.Linear(2, 2), layout=UNKNOWN_LAYOUT), ParallelSettings(), training, None
    )
    engine.parts[0].to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"weight: got torch.bfloat16 \[2, 2\], expected torch.float32 \[2, 2\]"):
        engine.full_parameters()


@pytest.mark.parametrize("name", SPLIT)
def test_split_logits_have_the_loss_and_predictions_of_whole_ones(folder: Path, name: str) -> None:
    limit = 1e-12 if name.startswith("float64") else 1e-6 if name.startswith("float32") else 1e-2
    for rank in range(NUM_RANKS):
        outcome = read(folder, f"split-{name}", rank)
        for unit in ("tokens", "samples"):
            whole, split = (
                {each: outcome[f"{kind}-{unit}-{each}"] for each in ("loss", "gradient", "predictions")}
                for kind in ("whole", "split")
            )
            assert split["loss"] == pytest.approx(whole["loss"], rel=limit)
            assert split["gradient"].shape == whole["gradient"].shape
            assert np.abs(split["gradient"] - whole["gradient"]).max(initial=0.0) < limit
            assert (split["predictions"] == whole["predictions"]).all()
