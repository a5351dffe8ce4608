"""The order of samples is independent of ranks, a job resumes at its sample, and padding does not affect the loss."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fanin.clients.data.examples import Examples
from fanin.datacenter.data.masked import MaskedSamples
from fanin.datacenter.data.samples import (
    Cursor,
    ExampleSamples,
    SampleOrder,
    WindowSamples,
    batch_share,
    samples_digest,
)
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective, token_means, token_objective
from fanin.edge.export import cross_entropy, next_token, squared_error
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput

sizes = st.integers(1, 40)


@given(num=sizes, first_size=sizes, second_size=sizes, stop=st.integers(0, 5), seed=st.integers(0, 9))
def test_every_sample_is_used_once_an_epoch_with_any_batch_size(
    num: int, first_size: int, second_size: int, stop: int, seed: int
) -> None:
    order, cursor, batches = SampleOrder(num, seed), Cursor(), []
    for step in range(200):
        if cursor.epoch == 2:
            break
        # Another batch size, as for a job that resumes elsewhere.
        indices, cursor = order.next_batch(cursor, first_size if step < stop else second_size)
        assert len(indices)
        batches.append(indices)
    sequence = np.concatenate(batches)
    expected = np.concatenate([order.next_batch(Cursor(epoch=epoch), num)[0] for epoch in range(2)])
    np.testing.assert_array_equal(sequence, expected[: len(sequence)])
    if cursor.epoch == 2:
        assert sorted(sequence) == sorted([*range(num), *range(num)])


@given(num=sizes, excess=st.integers(0, 5))
def test_an_order_of_fewer_samples_than_its_cursor_is_refused(num: int, excess: int) -> None:
    with pytest.raises(InvalidInput, match=f"samples: got {num}, of which {num + excess} were taken in epoch 3"):
        SampleOrder(num, 0).next_batch(Cursor(epoch=3, taken=num + excess), 4)


def test_the_seed_and_the_epoch_decide_the_order() -> None:
    first = SampleOrder(50, 1).next_batch(Cursor(), 50)[0]
    assert (first == SampleOrder(50, 1).next_batch(Cursor(), 50)[0]).all()
    assert (first != SampleOrder(50, 2).next_batch(Cursor(), 50)[0]).any()
    assert (first != SampleOrder(50, 1).next_batch(Cursor(epoch=1), 50)[0]).any()


def examples(num: int, kind: str) -> Examples:
    """Return examples in which x and y of each sample are its number."""
    numbers = np.arange(num, dtype=np.int32)
    if kind == "labels":
        return Examples(inputs={"x": numbers[:, None].astype(np.float32)}, y=numbers)
    if kind == "values":
        return Examples(inputs={"x": numbers[:, None].astype(np.float32)}, y=numbers[:, None].astype(np.float32))
    return Examples(inputs={"x": np.stack([numbers] * 3, 1)}, y=np.stack([numbers] * 3, 1))


@given(
    num=sizes, parts=st.integers(1, 5), pieces=st.integers(1, 3), kind=st.sampled_from(["labels", "values", "tokens"])
)
def test_the_parts_of_all_ranks_are_the_batch(num: int, parts: int, pieces: int, kind: str) -> None:
    samples, multiple = ExampleSamples(examples(num, kind)), parts * pieces
    batches = [batch_share(samples, np.arange(num), (rank, parts), multiple) for rank in range(parts)]
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert {len(batch.inputs) for batch in batches} == {-(-num // multiple) * pieces}
    expected = torch.arange(num)
    assert (inputs[:num].reshape(num, -1)[:, 0].long() == expected).all()
    assert (targets[:num].reshape(num, -1)[:, 0].long() == expected).all()
    padding = targets[num:]
    assert (padding.isnan() if padding.is_floating_point() else padding == NO_TOKEN).all()


@given(num_tokens=st.integers(2, 200), length=st.integers(1, 30))
def test_windows_are_the_text_and_each_next_token_is_a_target_once(num_tokens: int, length: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.int32)
    if num_tokens <= length:
        with pytest.raises(
            InvalidInput, match=f"^tokens: got {num_tokens}, expected at least {length + 1}, one window of"
        ):
            WindowSamples(tokens, length)
        return
    samples = WindowSamples(tokens, length)
    indices = np.arange(len(samples))
    inputs, targets = samples.take(indices)
    is_target = targets != NO_TOKEN
    assert (targets[is_target] == torch.arange(1, num_tokens)).all()
    assert (inputs[is_target] + 1 == targets[is_target]).all()
    assert samples.count(indices) == samples.units(indices) == int(is_target.sum()) == num_tokens - 1
    assert WindowSamples(tokens, length, per_token=False).count(indices) == len(samples)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (cross_entropy, (4, 3), torch.tensor([0, 2, 1, 1])),
        (squared_error, (4, 3), torch.arange(12.0).reshape(4, 3)),
        (next_token, (4, 2, 3), torch.tensor([[0, 1], [2, NO_TOKEN], [1, 1], [0, 0]])),
        (torch.nn.CrossEntropyLoss(reduction="none"), (4, 3), torch.tensor([0, 2, 1, 1])),
    ],
)
def test_padding_samples_add_nothing(loss: object, outputs: tuple[int, ...], targets: torch.Tensor) -> None:
    assert callable(loss)
    objective = padded_objective(loss)
    values = torch.randn(outputs, generator=torch.Generator().manual_seed(0), requires_grad=True)
    padded_targets = targets.clone()
    padded_targets[2:] = float("nan") if targets.is_floating_point() else NO_TOKEN
    total = objective.loss_sum(values, padded_targets)
    assert int(objective.count(padded_targets)) == 2
    assert total.item() == pytest.approx(loss(values[:2], targets[:2]).sum().item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, values)
    assert gradient[:2].abs().max() > 0
    assert (gradient[2:] == 0).all()


def test_a_mean_over_tokens_and_one_over_samples_differ_where_samples_do() -> None:
    logits = torch.randn((2, 3, 5), generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3], [4, NO_TOKEN, NO_TOKEN]])
    by_token, by_sample = token_objective(over_samples=False), token_objective(over_samples=True)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-1, reduction="none")
    assert by_token.loss_sum(logits, tokens).item() == pytest.approx(each.sum().item())
    assert int(by_token.count(tokens)) == 4
    assert by_sample.loss_sum(logits, tokens).item() == pytest.approx((each[:3].mean() + each[3]).item())
    assert int(by_sample.count(tokens)) == 2
    np.testing.assert_allclose(token_means(logits, tokens), next_token(logits, tokens), rtol=1e-6)


def test_positions_without_a_token_count_for_nothing() -> None:
    logits = torch.zeros(1, 2, 3)
    targets = torch.full((1, 2), NO_TOKEN)
    assert token_means(logits, targets).tolist() == [0.0]
    scored = ScoredObjective(token_objective(over_samples=False))
    assert scored.score(torch.tensor([1, 0]), torch.tensor([1, NO_TOKEN])).tolist() == [1.0, 1.0]


def test_the_digest_is_that_of_the_samples_and_their_order() -> None:
    x, y = np.arange(400, dtype=np.float32).reshape(100, 4), np.arange(100, dtype=np.int32)
    others = (
        (x[::-1], y[::-1]),
        (np.roll(x, 1, axis=0), np.roll(y, 1)),
        (x + np.float32(1.0), y),
        (x, (y + 1) % 100),
        (x.reshape(100, 2, 2), y),
        (x[:99], y[:99]),
        (x.view(np.int32), y),
    )
    digests = [
        samples_digest(ExampleSamples(Examples(inputs={"x": x}, y=y))) for x, y in ((x, y), (x.copy(), y), *others)
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 1 + len(others)
    tokens = np.arange(50)
    assert samples_digest(WindowSamples(tokens, 8)) != samples_digest(WindowSamples(tokens[::-1], 8))


def test_the_digest_of_hidden_tokens_is_the_same_in_every_epoch() -> None:
    samples = MaskedSamples(tokens=np.arange(50) % 7, length=8, num_tokens=7, seed=3)
    assert samples_digest(samples) == samples_digest(samples.of_epoch(2))
