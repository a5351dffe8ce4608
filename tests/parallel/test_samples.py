"""The order of samples is independent of ranks, a job resumes at its sample, and padding does not affect the loss."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fanin.clients.data.examples import Examples
from fanin.datacenter.data.samples import Cursor, ExampleSamples, SampleOrder, WindowSamples, batch_share
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective, token_means, token_objective
from fanin.edge.export import cross_entropy, next_token, squared_error
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput

sizes = st.integers(1, 40)


@given(num=sizes, before=sizes, after=sizes, stop=st.integers(0, 5), seed=st.integers(0, 9))
def test_every_sample_is_taken_once_an_epoch_whatever_the_batches(
    num: int, before: int, after: int, stop: int, seed: int
) -> None:
    order, cursor, taken = SampleOrder(num, seed), Cursor(), []
    for step in range(200):
        if cursor.epoch == 2:
            break
        # Another batch size, as for a job that resumes elsewhere.
        indices, cursor = order.next_batch(cursor, before if step < stop else after)
        assert len(indices)
        taken.append(indices)
    found = np.concatenate(taken)
    one = np.concatenate([order.next_batch(Cursor(epoch=epoch), num)[0] for epoch in range(2)])
    np.testing.assert_array_equal(found, one[: len(found)])
    if cursor.epoch == 2:
        assert sorted(found) == sorted([*range(num), *range(num)])


@given(num=sizes, more=st.integers(0, 5))
def test_an_order_of_fewer_samples_than_were_taken_is_told(num: int, more: int) -> None:
    with pytest.raises(InvalidInput, match=f"samples: got {num}, of which {num + more} were taken in epoch 3"):
        SampleOrder(num, 0).next_batch(Cursor(epoch=3, taken=num + more), 4)


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
    batches = [batch_share(samples, np.arange(num), (which, parts), multiple) for which in range(parts)]
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert {len(batch.inputs) for batch in batches} == {-(-num // multiple) * pieces}
    expected = torch.arange(num)
    assert (inputs[:num].reshape(num, -1)[:, 0].long() == expected).all()
    assert (targets[:num].reshape(num, -1)[:, 0].long() == expected).all()
    rest = targets[num:]
    assert (rest.isnan() if rest.is_floating_point() else rest == NO_TOKEN).all()


@given(num_tokens=st.integers(2, 200), length=st.integers(1, 30))
def test_windows_are_the_text_and_each_next_token_is_asked_for_once(num_tokens: int, length: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.int32)
    if num_tokens <= length:
        with pytest.raises(
            InvalidInput, match=f"^tokens: got {num_tokens}, expected at least {length + 1}, one window of"
        ):
            WindowSamples(tokens, length)
        return
    samples = WindowSamples(tokens, length)
    everything = np.arange(len(samples))
    inputs, targets = samples.take(everything)
    asked = targets != NO_TOKEN
    assert (targets[asked] == torch.arange(1, num_tokens)).all()
    assert (inputs[asked] + 1 == targets[asked]).all()
    assert samples.count(everything) == samples.units(everything) == int(asked.sum()) == num_tokens - 1
    assert WindowSamples(tokens, length, per_token=False).count(everything) == len(samples)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (cross_entropy, (4, 3), torch.tensor([0, 2, 1, 1])),
        (squared_error, (4, 3), torch.arange(12.0).reshape(4, 3)),
        (next_token, (4, 2, 3), torch.tensor([[0, 1], [2, NO_TOKEN], [1, 1], [0, 0]])),
        (torch.nn.CrossEntropyLoss(reduction="none"), (4, 3), torch.tensor([0, 2, 1, 1])),
    ],
)
def test_samples_that_fill_up_add_nothing(loss: object, outputs: tuple[int, ...], targets: torch.Tensor) -> None:
    assert callable(loss)
    objective = padded_objective(loss)
    given_outputs = torch.randn(outputs, generator=torch.Generator().manual_seed(0), requires_grad=True)
    filled = targets.clone()
    filled[2:] = float("nan") if targets.is_floating_point() else NO_TOKEN
    total = objective.loss_sum(given_outputs, filled)
    assert int(objective.count(filled)) == 2
    assert total.item() == pytest.approx(loss(given_outputs[:2], targets[:2]).sum().item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, given_outputs)
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
    nothing = torch.full((1, 2), NO_TOKEN)
    assert token_means(logits, nothing).tolist() == [0.0]
    scored = ScoredObjective(token_objective(over_samples=False))
    assert scored.score(torch.tensor([1, 0]), torch.tensor([1, NO_TOKEN])).tolist() == [1.0, 1.0]
