"""A cut into stages is the best possible one, and the stages compute what the model computes."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.pipelines.schedules import Pipeline
from fanin.datacenter.parallel.pipelines.stages import cut, split, stage_of_parameters
from fanin.protos.errors import InvalidInput

CONFIG = DecoderConfig(vocabulary=11, width=8, num_layers=5, num_heads=2, num_kv_heads=1, feed_forward=6, tied=True)


def slowest_time(shares: tuple[range, ...], times: list[float]) -> float:
    """Return the time of the slowest stage. The first stage also has the inputs, the last the outputs."""
    sums = [sum(times[1 + layer] for layer in share) for share in shares]
    sums[0] += times[0]
    sums[-1] += times[-1]
    return max(sums)


@given(times=st.lists(st.integers(0, 20), min_size=3, max_size=9), data=st.data())
def test_no_other_cut_has_a_faster_slowest_stage(times: list[int], data: st.DataObject) -> None:
    num_layers = len(times) - 2
    num_stages = data.draw(st.integers(1, num_layers))
    shares = cut(num_layers, num_stages, times)
    assert [layer for share in shares for layer in share] == list(range(num_layers))
    assert all(shares)
    others = (
        tuple(range(start, end) for start, end in zip((0, *bounds), (*bounds, num_layers), strict=True))
        for bounds in combinations(range(1, num_layers), num_stages - 1)
    )
    assert slowest_time(shares, times) == min(slowest_time(other, times) for other in others)


@given(num_layers=st.integers(1, 30), data=st.data())
def test_without_times_stages_differ_by_one_layer_at_most_in_the_slowest(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    assert max(map(len, cut(num_layers, num_stages))) == -(-num_layers // num_stages)


@pytest.mark.parametrize(("num_layers", "num_stages", "times"), [(2, 3, ()), (2, 0, ()), (2, 1, (1.0, 1.0))])
def test_an_impossible_cut_is_refused(num_layers: int, num_stages: int, times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        cut(num_layers, num_stages, times)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("GPipe", 1), ("GPipe", 5), ("Interleaved1F1B", 2), ("ZBV", 2)])
def test_the_stages_one_after_the_other_are_the_model(schedule: str, num_ranks: int) -> None:
    model, layout = Decoder(CONFIG), decoder_layout(CONFIG)
    tokens = torch.arange(6).reshape(2, 3)
    expected = model(tokens)
    pipeline = Pipeline(
        schedule=schedule, num_ranks=num_ranks, stages_per_rank=1 if schedule == "GPipe" else 2, microbatches=2
    )
    stages = [stage for rank in range(num_ranks) for stage in split(model, layout, pipeline, rank, ())]
    stream = tokens
    for stage in sorted(stages, key=lambda stage: stage.index):
        stream = stage.part(stream)
    assert torch.equal(stream, expected)
    stage_of = stage_of_parameters(model, layout, pipeline.num_stages)
    assert list(stage_of) == [name for name, _ in model.named_parameters()]
    for stage in stages:
        parameters = {name: value for name, value in stage.part.named_parameters() if stage_of.get(name) == stage.index}
        assert set(parameters) == {name for name, index in stage_of.items() if index == stage.index}
        assert all(value is model.get_parameter(name) for name, value in parameters.items()), "no value is held twice"
        # A tied copy is separate, even if its original is on the same rank.
        extra_names = set(dict(stage.part.named_parameters())) - set(parameters)
        assert extra_names == ({"head.weight"} if stage.index == pipeline.num_stages - 1 > 0 else set())


def test_a_parameter_outside_the_layout_cannot_be_cut() -> None:
    model = Decoder(CONFIG)
    model.extra = torch.nn.Linear(1, 1)
    assert stage_of_parameters(model, decoder_layout(CONFIG), 1)["extra.weight"] == 0
    with pytest.raises(InvalidInput, match="FN-1279"):
        stage_of_parameters(model, decoder_layout(CONFIG), 2)
