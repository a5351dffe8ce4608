"""Weights are exported and imported as one safetensors file, under the names that one process uses."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.programs import Programs
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.nightly import in_ci
from torch import nn

from fanin.datacenter.checkpoints.weights import export_weights, import_weights, load_weights
from fanin.datacenter.config.settings import UNKNOWN_LAYOUT
from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.protos.errors import InvalidInput

PEAK = Path(__file__).with_name("peak.py")
TRAINING = TrainingSettings(batch_size=2, learning_rate=0.1)
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=in_ci((4, 8), (4,)))
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks: four in CI, and also eight in the nightly suite."""
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs, num_ranks: int) -> Path:
    """Return the folder with the results of ``checkpoints.py``, which ran with warnings as errors."""
    results_folder = tmp_path_factory.mktemp("weights")
    programs.check("checkpoints", results_folder, "weights", num_ranks)
    return results_folder


def read(folder: Path, name: str) -> Arrays:
    with np.load(folder / f"{name}.npz") as archive:
        return dict(archive)


def test_ranks_write_one_file_that_any_reader_accepts(folder: Path) -> None:
    expected, weights = read(folder, "given"), load_file(folder / "tied.safetensors")
    expected.pop("losses")
    assert "embed.weight" in weights
    assert "head.weight" not in weights, "a tied weight is there once"
    assert set(weights) == set(expected)
    assert all((weights[name] == expected[name]).all() for name in expected)
    with safe_open(folder / "tied.safetensors", framework="np") as file:
        assert file.metadata() == {"made_by": "a test"}


def test_weights_imported_at_another_mesh_have_the_same_bits_and_train_alike(folder: Path) -> None:
    expected, actual = read(folder, "given"), read(folder, "taken")
    assert np.abs(expected.pop("losses") - actual.pop("losses")).max() <= 1e-10
    assert set(expected) == set(actual)
    assert all((expected[name] == actual[name]).all() for name in expected)


def test_another_models_weights_are_refused_on_all_ranks_alike_and_change_nothing(folder: Path, num_ranks: int) -> None:
    rows = [json.loads(str(row)) for row in read(folder, "refused")["told"]]
    assert len(rows) == num_ranks
    assert all(row == rows[0] for row in rows)
    error, unchanged = rows[0]
    assert unchanged
    assert error.startswith(f"InvalidInput: {folder}/tied.safetensors: got 38 tensors: 18 unknown to the model")


class Mixed(nn.Module):
    """Parameters of several types and shapes, with smaller types first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.bfloat16, (3,)),
            (torch.float16, (1, 5)),
            (torch.float32, ()),
            (torch.float64, (2, 3)),
            (torch.float32, (0, 4)),
        ]
        for index, (dtype, shape) in enumerate(shapes):
            value = torch.rand(shape, generator=generator).to(dtype)
            self.register_parameter(f"value{index}", nn.Parameter(value))


def mixed_engine(seed: int) -> Engine:
    return build_engine(TrainableModel(module=Mixed(seed), layout=UNKNOWN_LAYOUT), ParallelSettings(), TRAINING, None)


@given(seed=st.integers(0, 2**31))
def test_every_type_comes_back_bit_for_bit_and_aligned(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("mixed") / "weights.safetensors"
    export_weights(mixed_engine(seed), path)
    other = mixed_engine(seed + 1)
    import_weights(other, path)
    before, after = mixed_engine(seed).full_parameters(), other.full_parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    (size,) = struct.unpack("<Q", path.read_bytes()[:8])
    header = json.loads(path.read_bytes()[8 : 8 + size])
    widths = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    assert all((8 + size + row["data_offsets"][0]) % widths[row["dtype"]] == 0 for row in header.values())
    assert [path.name for path in path.parent.iterdir()] == ["weights.safetensors"]


def decoder_engine() -> Engine:
    config = DecoderConfig(vocabulary=11, width=16, num_layers=1, num_heads=2, num_kv_heads=1, feed_forward=8)
    return build_engine(
        TrainableModel(module=Decoder(config), layout=decoder_layout(config)), ParallelSettings(), TRAINING, None
    )


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _corrupt_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")


def _clear(path: Path) -> None:
    path.write_bytes(b"")


def _remove(path: Path) -> None:
    path.unlink()


def _edit(path: Path, change: Callable[[Arrays], None]) -> None:
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)


def _rename_tensor(path: Path) -> None:
    _edit(path, lambda arrays: arrays.update({"norm.scale": arrays.pop("norm.weight")}))


def _reshape_tensor(path: Path) -> None:
    _edit(path, lambda arrays: arrays.update({"norm.weight": arrays["norm.weight"].reshape(4, 4)}))


def _retype_tensor(path: Path) -> None:
    _edit(path, lambda arrays: arrays.update({"norm.weight": arrays["norm.weight"].astype(np.float64)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not a complete safetensors file"),
        (_lengthen, "not a complete safetensors file"),
        (_corrupt_header, "not a complete safetensors file"),
        (_clear, "not a complete safetensors file"),
        (_remove, "no such file, expected a .safetensors file"),
        (
            _rename_tensor,
            "1 unknown to the model, 1 missing, such as norm.scale: got F32",
        ),
        (_reshape_tensor, r"such as norm.weight: got F32 \[4, 4\], expected F32 \[16\]"),
        (_retype_tensor, r"such as norm.weight: got F64 \[16\], expected F32 \[16\]"),
    ],
)
def test_a_bad_file_is_one_clear_error_and_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    engine, path = decoder_engine(), tmp_path / "weights.safetensors"
    export_weights(engine, path)
    before = engine.full_parameters()
    damage(path)
    with pytest.raises(InvalidInput, match=message):
        import_weights(engine, path)
    after = engine.full_parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_type_that_has_no_name_is_refused_before_a_file_is_created(tmp_path: Path) -> None:
    module = nn.Module()
    module.value = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    engine = build_engine(TrainableModel(module=module, layout=UNKNOWN_LAYOUT), ParallelSettings(), TRAINING, None)
    with pytest.raises(InvalidInput, match="FN-1319"):
        export_weights(engine, tmp_path / "weights.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_no_rank_holds_a_second_model(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(PEAK), str(tmp_path)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert completed.returncode == 0, completed.stderr
    for row in [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]:
        # The largest tensor is a sixty-fourth of the model. An export holds copies of some tensors, but less than a
        # shard.
        assert row["export_bytes"] < row["shard_bytes"] == row["model_bytes"] // 4, row
        assert row["import_bytes"] < row["largest_bytes"], row
        # A start needs a quarter of the model, the pages of the tensor that is read, and memory for torch's first
        # calls.
        assert row["start_bytes"] < 1.5 * row["shard_bytes"], row
        # The whole model passes through the first rank. Few of its written pages stay in memory.
        assert row["seed_bytes"] < 0.6 * row["model_bytes"], row


class Shared(nn.Module):
    """One matrix with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("names", [["embed"], ["head"], ["embed", "head"]])
def test_a_shared_parameter_is_loaded_under_any_of_its_names(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({f"{name}.weight": VALUES for name in names}, path)
    engine = build_engine(TrainableModel(module=Shared(), layout=UNKNOWN_LAYOUT), ParallelSettings(), TRAINING, None)
    import_weights(engine, path)
    assert {name: value.tolist() for name, value in engine.full_parameters().items()} == {
        "embed.weight": VALUES.tolist()
    }
    module = Shared()
    load_weights(module, path)
    assert module.head.weight.tolist() == VALUES.tolist()


def test_two_different_copies_of_a_shared_parameter_are_refused(tmp_path: Path) -> None:
    path, module = tmp_path / "weights.safetensors", Shared()
    save_file({"embed.weight": VALUES, "head.weight": VALUES + 1.0}, path)
    before = module.embed.weight.tolist()
    message = "got two different tensors embed.weight and head.weight, expected equal ones or one of them: they are one"
    with pytest.raises(InvalidInput, match=message):
        load_weights(module, path)
    assert module.embed.weight.tolist() == before


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_with_their_tensor(tmp_path: Path, value: float) -> None:
    path, values = tmp_path / "weights.safetensors", VALUES.copy()
    values[1, 2] = value
    save_file({"embed.weight": values}, path)
    engine = build_engine(TrainableModel(module=Shared(), layout=UNKNOWN_LAYOUT), ParallelSettings(), TRAINING, None)
    message = "weights.safetensors: got values that are not finite in embed.weight, expected finite ones; take"
    with pytest.raises(InvalidInput, match=message):
        import_weights(engine, path)
    with pytest.raises(InvalidInput, match=message):
        load_weights(Shared(), path)
