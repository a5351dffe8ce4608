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
from fanin.datacenter.jobs.job import train
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
def test_windows_are_the_text_and_what_is_asked_for_is_what_stands_there(
    num: int, length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    if num < length:
        with pytest.raises(
            InvalidInput, match=f"^tokens: got {num}, expected at least {length}, one window; use more data"
        ):
            samples(num, length)
        return
    found = samples(num, length, seed, epoch)
    everything = np.arange(len(found))
    inputs, targets = found.take(everything)
    starts = np.minimum(everything * length, num - length)
    places = starts[:, None] + np.arange(length)
    assert set(places.ravel()) == set(range(num)), "nothing of the text is left out"
    text, asked = torch.from_numpy(places % 2), targets != NO_TOKEN
    assert (targets[asked] == text[asked]).all()
    assert (inputs[~asked] == text[~asked]).all()
    assert (inputs <= 2).all()
    assert asked.any(dim=1).all(), "each window is asked something"
    assert found.count(everything) == int(asked.sum())
    assert found.units(everything) == text.numel()
    # This holds for any part of the samples, in any order, on any rank.
    some = np.array(data.draw(st.lists(st.sampled_from(list(everything)), min_size=1)))
    again = samples(num, length, seed, epoch).take(some)
    assert torch.equal(again[0], inputs[some])
    assert torch.equal(again[1], targets[some])
    assert found.count(some) == int(asked[some].sum())
    assert replace(found, per_token=False).count(some) == len(some)


def test_shares_are_those_of_the_paper() -> None:
    # All of the text is token 0 of 50, so a replaced token is visible unless the replacement is 0 as well.
    found = MaskedSamples(tokens=np.zeros(400_000, np.uint8), length=100, num_tokens=50, seed=1)
    inputs, targets = found.take(np.arange(len(found)))
    asked = targets != NO_TOKEN
    assert float(asked.double().mean()) == pytest.approx(0.15, abs=0.002)
    shown = inputs[asked]
    assert float((shown == 50).double().mean()) == pytest.approx(0.8, abs=0.005)
    others = shown[(shown != 50) & (shown != 0)]
    assert len(others) / len(shown) == pytest.approx(0.1 * 49 / 50, abs=0.005)
    counts = torch.bincount(others, minlength=50)[1:].double()
    assert float(counts.min() / counts.mean()) > 0.75, "any token of the text, each as often"


def test_seed_epoch_and_what_is_held_out_ask_for_other_places() -> None:
    first = samples(1000, 50)
    everything = np.arange(len(first))
    asked = first.take(everything)[1] != NO_TOKEN
    for other in (samples(1000, 50, seed=1), first.of_epoch(1), replace(first, stream=1)):
        same = (other.take(everything)[1] != NO_TOKEN) & asked
        assert 0 < int(same.sum()) < int(asked.sum()) / 2
    assert torch.equal(first.of_epoch(1).of_epoch(0).take(everything)[1] != NO_TOKEN, asked)


@settings(max_examples=20)
@given(parts=st.integers(1, 4), num=st.integers(1, 7))
def test_the_parts_of_all_ranks_are_asked_what_one_is(parts: int, num: int) -> None:
    found, indices = samples(80, 8), np.arange(num)
    whole = batch_share(found, indices, (0, 1), num)
    each = [batch_share(found, indices, (which, parts), parts) for which in range(parts)]
    assert torch.equal(torch.cat([part.inputs for part in each])[:num], whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in each])[:num], whole.targets)
    assert (torch.cat([part.targets for part in each])[num:] == NO_TOKEN).all()


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


def test_a_job_that_goes_on_is_asked_the_same(tmp_path: Path) -> None:
    whole = config(tmp_path)
    losses = train(whole, 0, 1).metrics.trained.losses
    # Three and a half epochs. The second part begins in the middle of an epoch.
    assert len(losses) == 12
    kept = CheckpointSettings(folder=tmp_path / "kept")
    train(replace(whole, stop=StopSettings(steps=5), checkpoints=kept), 0, 1)
    assert train(replace(whole, checkpoints=kept), 0, 1).metrics.trained.losses == losses


def test_the_mask_is_a_token_of_the_vocabulary(tmp_path: Path) -> None:
    made = build_job_model(config(tmp_path))
    inputs, _ = made.data.train.take(np.arange(4))
    assert int(inputs.max()) == 4
    fewer = config(tmp_path, model={"encoder": {"vocabulary": 4, "context": 8}})
    with pytest.raises(InvalidInput, match=r"text.txt and a mask: got 5 tokens, expected at most the model's 4"):
        build_job_model(fewer)


def test_a_window_is_no_longer_than_the_encoders_context(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="data: got length 9, expected at most the model's 8 positions"):
        check_config(config(tmp_path, data={"length": 9}), 1)
    path = tmp_path / "tokens.npz"
    np.savez(path, x=np.zeros((3, 9), np.int32), y=np.zeros((3, 9), np.int32))
    longer = replace(config(tmp_path), data=replace(config(tmp_path).data, text="", examples=path))
    with pytest.raises(InvalidInput, match=r"got 9 tokens a sample, expected at most the model's 8 positions"):
        build_job_model(longer)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["pp=2,dp_shard=2,tp=2", "dp_replicate=2"])
def test_an_encoder_on_a_mesh_has_the_losses_of_one_process(tmp_path: Path, mesh: str) -> None:
    found = []
    for shape in (MeshShape(), MeshShape.parse(mesh)):
        parallel = ParallelSettings(mesh=shape, schedule="GPipe")
        trained = launch(replace(config(tmp_path), parallel=parallel), shape.num_ranks, tmp_path / str(shape))
        found.append((trained.metrics.trained.losses, trained.metrics.trained.evaluated[-1].validation_loss))
    (alone, held), (together, others) = found
    assert np.abs(np.array(alone) - np.array(together)).max() < 1e-5
    assert abs(held - others) < 1e-5
