"""Four ranks agree on steps that are not finite, on parameters after an evaluation, and on shared parameters."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.programs import Programs
from parallel.quads import HALF_SETTINGS, NUM_RANKS, SKIP_SETTINGS, SPLIT, Shared
from torch import nn

from fanin.datacenter.config.settings import UNKNOWN_LAYOUT
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transforms.ties import check_shared, check_still_shared, shared_names, unshared
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import UnsupportedModel

STATES = ("gathered", "written", "restored", "loaded")
TIED = ("embed.weight", "head.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """Return the folder with the results of ``quads.py``, which ran with warnings as errors."""
    results_folder = tmp_path_factory.mktemp("quads")
    programs.check("quads", results_folder)
    return results_folder


def read(folder: Path, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}-{rank}.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("name", SKIP_SETTINGS)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(folder: Path, name: str) -> None:
    for rank in range(NUM_RANKS):
        results = read(folder, f"broken-{name}", rank)
        assert results["skipped"][:, 0].tolist() == [False, True, False]
        assert results["skipped"][:, 1].all(), "the losses themselves are finite"
        assert results["moved"].tolist() == [True, False, True]


@pytest.mark.parametrize("name", HALF_SETTINGS)
def test_an_evaluation_leaves_the_parameters_in_their_own_dtype(folder: Path, name: str) -> None:
    for rank in range(NUM_RANKS):
        matches = dict(zip(STATES, read(folder, f"half-{name}", rank)["same"], strict=True))
        assert all(matches.values()), matches


@pytest.mark.parametrize("name", ["dp_shard", "layers", "ddp"])
def test_shared_parameters_stay_one_on_copies_and_shards(folder: Path, name: str) -> None:
    reference = read(folder, "shared-alone")
    for rank in range(NUM_RANKS):
        results = read(folder, f"shared-{name}", rank)
        for key in reference:
            assert np.abs(results[key] - reference[key]).max() <= 1e-12, key


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_a_mesh_that_would_untie_parameters_is_refused(folder: Path, name: str) -> None:
    for rank in range(NUM_RANKS):
        error = str(read(folder, f"shared-{name}", rank)["told"])
        assert "got one parameter under the names embed.weight, head.weight, expected tp 1, and pp 1" in error


def test_shared_parameters_are_detected_by_identity() -> None:
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
    with pytest.raises(UnsupportedModel, match="FN-1294"):
        check_shared(module, layout, MeshShape(tp=2), stages)


def test_a_broken_tie_is_refused() -> None:
    module, parallel = Shared(), ParallelSettings()
    ties = shared_names(module)
    check_still_shared(module, ties)
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    with pytest.raises(UnsupportedModel, match="FN-1294"):
        check_still_shared(module, ties)
    assert shared_names(module) == (("layers.0.weight", "layers.1.weight"),)
    engine = build_engine(
        TrainableModel(module=Shared(), layout=UNKNOWN_LAYOUT),
        parallel,
        TrainingSettings(batch_size=2, learning_rate=0.1),
        None,
    )
    assert len(engine.full_parameters()) == len(dict(module.named_parameters())) - 1


def test_a_replaced_parameter_value_is_refused() -> None:
    training = TrainingSettings(batch_size=2, learning_rate=0.1)
    engine = build_engine(
        TrainableModel(module=nn.Linear(2, 2), layout=UNKNOWN_LAYOUT), ParallelSettings(), training, None
    )
    engine.parts[0].to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"weight: got torch.bfloat16 \[2, 2\], expected torch.float32 \[2, 2\]"):
        engine.full_parameters()


@pytest.mark.parametrize("name", SPLIT)
def test_split_logits_have_the_loss_and_predictions_of_complete_ones(folder: Path, name: str) -> None:
    limit = 1e-12 if name.startswith("float64") else 1e-6 if name.startswith("float32") else 1e-2
    for rank in range(NUM_RANKS):
        outcome = read(folder, f"split-{name}", rank)
        for unit in ("tokens", "samples"):
            expected, actual = (
                {each: outcome[f"{kind}-{unit}-{each}"] for each in ("loss", "gradient", "predictions")}
                for kind in ("whole", "split")
            )
            assert actual["loss"] == pytest.approx(expected["loss"], rel=limit)
            assert actual["gradient"].shape == expected["gradient"].shape
            assert np.abs(actual["gradient"] - expected["gradient"]).max(initial=0.0) < limit
            assert (actual["predictions"] == expected["predictions"]).all()
