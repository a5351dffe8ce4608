"""The targets of an encoder depend only on the text, the seed and the epoch, and their shares are the paper's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fanin.datacenter.config.settings import CheckpointSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig, check_config, parse_config
from fanin.datacenter.data.masked import MaskedSamples
from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput


def samples(num: int, length: int, seed: int = 0, epoch: int = 0) -> MaskedSamples:
    """Return samples of a text in which two tokens alternate, so that the mask is token 2."""
    return MaskedSamples(tokens=np.arange(num) % 2, length=length, num_tokens=2, seed=seed).of_epoch(epoch)


@settings(max_examples=40)
@given(
    num=st.integers(1, 300),
    length=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 9),
    data=st.data(),
)
def test_windows_are_the_text_and_targets_are_its_original_tokens(
    num: int, length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    if num < length:
        with pytest.raises(
            InvalidInput, match=f"^tokens: got {num}, expected at least {length}, one window; use more data"
        ):
            samples(num, length)
        return
    dataset = samples(num, length, seed, epoch)
    indices = np.arange(len(dataset))
    inputs, targets = dataset.take(indices)
    starts = np.minimum(indices * length, num - length)
    positions = starts[:, None] + np.arange(length)
    assert set(positions.ravel()) == set(range(num)), "nothing of the text is left out"
    text, is_target = torch.from_numpy(positions % 2), targets != NO_TOKEN
    assert (targets[is_target] == text[is_target]).all()
    assert (inputs[~is_target] == text[~is_target]).all()
    assert (inputs <= 2).all()
    assert is_target.any(dim=1).all(), "each window is asked something"
    assert dataset.count(indices) == int(is_target.sum())
    assert dataset.units(indices) == text.numel()
    # This holds for any part of the samples, in any order, on any rank.
    subset = np.array(data.draw(st.lists(st.sampled_from(list(indices)), min_size=1)))
    subset_batch = samples(num, length, seed, epoch).take(subset)
    assert torch.equal(subset_batch[0], inputs[subset])
    assert torch.equal(subset_batch[1], targets[subset])
    assert dataset.count(subset) == int(is_target[subset].sum())
    assert replace(dataset, per_token=False).count(subset) == len(subset)


def test_shares_are_those_of_the_paper() -> None:
    # All of the text is token 0 of 50, so a replaced token is visible unless the replacement is 0 as well.
    dataset = MaskedSamples(tokens=np.zeros(400_000, np.uint8), length=100, num_tokens=50, seed=1)
    inputs, targets = dataset.take(np.arange(len(dataset)))
    is_target = targets != NO_TOKEN
    assert float(is_target.double().mean()) == pytest.approx(0.15, abs=0.002)
    target_inputs = inputs[is_target]
    assert float((target_inputs == 50).double().mean()) == pytest.approx(0.8, abs=0.005)
    replacements = target_inputs[(target_inputs != 50) & (target_inputs != 0)]
    assert len(replacements) / len(target_inputs) == pytest.approx(0.1 * 49 / 50, abs=0.005)
    counts = torch.bincount(replacements, minlength=50)[1:].double()
    assert float(counts.min() / counts.mean()) > 0.75, "any token of the text, each as often"


def test_seed_epoch_and_stream_choose_other_positions() -> None:
    first = samples(1000, 50)
    indices = np.arange(len(first))
    is_target = first.take(indices)[1] != NO_TOKEN
    for other in (samples(1000, 50, seed=1), first.of_epoch(1), replace(first, stream=1)):
        overlap = (other.take(indices)[1] != NO_TOKEN) & is_target
        assert 0 < int(overlap.sum()) < int(is_target.sum()) / 2
    assert torch.equal(first.of_epoch(1).of_epoch(0).take(indices)[1] != NO_TOKEN, is_target)


@settings(max_examples=20)
@given(parts=st.integers(1, 4), num=st.integers(1, 7))
def test_the_parts_of_all_ranks_have_the_targets_of_one(parts: int, num: int) -> None:
    dataset, indices = samples(80, 8), np.arange(num)
    batch = batch_share(dataset, indices, (0, 1), num)
    shares = [batch_share(dataset, indices, (index, parts), parts) for index in range(parts)]
    assert torch.equal(torch.cat([part.inputs for part in shares])[:num], batch.inputs)
    assert torch.equal(torch.cat([part.targets for part in shares])[:num], batch.targets)
    assert (torch.cat([part.targets for part in shares])[num:] == NO_TOKEN).all()


ENCODER = """
data = { text = "TEXT", length = 8, held_fraction = 0.3 }
training = { batch_size = 4, learning_rate = 0.01 }
stop = { steps = 12 }
model.encoder = { vocabulary = 5, context = 8, width = 16, num_layers = 2, num_heads = 2, feed_forward = 16 }
"""


def config(folder: Path, **tables: dict[str, object]) -> TrainConfig:
    path = folder / "text.txt"
    path.write_text("abcdabddabccab" * 10)
    return parse_config(ENCODER.replace("TEXT", str(path)), "here", tables)


def test_a_resumed_job_has_the_same_targets(tmp_path: Path) -> None:
    full_config = config(tmp_path)
    losses = train_rank(full_config).metrics.trained.losses
    # Three and a half epochs. The second part begins in the middle of an epoch.
    assert len(losses) == 12
    checkpoints = CheckpointSettings(folder=tmp_path / "kept")
    train_rank(replace(full_config, stop=StopSettings(steps=5), checkpoints=checkpoints))
    assert train_rank(replace(full_config, checkpoints=checkpoints)).metrics.trained.losses == losses


def test_the_mask_is_a_token_of_the_vocabulary(tmp_path: Path) -> None:
    job_model = build_job_model(config(tmp_path))
    inputs, _ = job_model.data.train.take(np.arange(4))
    assert int(inputs.max()) == 4
    small_config = config(tmp_path, model={"encoder": {"vocabulary": 4, "context": 8}})
    with pytest.raises(InvalidInput, match="FN-1233"):
        build_job_model(small_config)


def test_a_window_is_no_longer_than_the_encoders_context(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-1235"):
        check_config(config(tmp_path, data={"length": 9}), 1)
    path = tmp_path / "tokens.npz"
    np.savez(path, x=np.zeros((3, 9), np.int32), y=np.zeros((3, 9), np.int32))
    long_config = replace(config(tmp_path), data=replace(config(tmp_path).data, text="", examples=path))
    with pytest.raises(InvalidInput, match="FN-1235"):
        build_job_model(long_config)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["pp=2,dp_shard=2,tp=2", "dp_replicate=2"])
def test_an_encoder_on_a_mesh_has_the_losses_of_one_process(tmp_path: Path, mesh: str) -> None:
    results = []
    for shape in (MeshShape(), MeshShape.parse(mesh)):
        parallel = ParallelSettings(mesh=shape, schedule="GPipe")
        result = launch(replace(config(tmp_path), parallel=parallel), shape.num_ranks, tmp_path / str(shape))
        results.append((result.metrics.trained.losses, result.metrics.trained.evaluated[-1].validation_loss))
    (reference, reference_loss), (losses, loss) = results
    assert np.abs(np.array(reference) - np.array(losses)).max() < 1e-5
    assert abs(reference_loss - loss) < 1e-5
