"""When training stops, what it keeps, and that it is plain SGD with momentum."""

import numpy as np
import pytest
import torch

from fanin.clients.data import Examples
from fanin.datacenter.jobfiles import TrainSettings
from fanin.datacenter.parameters import parameter_vector
from fanin.datacenter.trainer import EVALUATE_BATCH, Trainer, fit
from fanin.edge.export import cross_entropy, next_token, squared_error
from fanin.protos.errors import InvalidInput


def model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(4, 3)


def data(num: int, seed: int) -> Examples:
    """Labels that a linear model can learn, but not all of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 4)).astype(np.float32)
    return Examples(x=x, y=(x[:, :3] + 0.5 * rng.normal(size=(num, 3))).argmax(axis=1).astype(np.int32))


def test_a_step_is_torchs_own_sgd_on_the_mean_loss() -> None:
    ours, theirs = model(), model()
    settings = TrainSettings(learning_rate=0.1, momentum=0.9)
    trainer = Trainer(ours, cross_entropy, settings, None)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        batch = data(7, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(theirs(torch.from_numpy(batch.x)), torch.from_numpy(batch.y).long())
        loss.backward()
        optimizer.step()
        assert float(trainer.step(batch)) == pytest.approx(loss.item(), abs=1e-6)
    assert np.abs(parameter_vector(ours) - parameter_vector(theirs)).max() < 1e-6


def test_training_stops_when_flat_and_keeps_the_best_epoch() -> None:
    train, validation = data(60, 1), data(60, 2)
    settings = TrainSettings(learning_rate=0.3, max_epochs=200, patience=4)
    trainer = Trainer(model(), cross_entropy, settings, None)
    trained = fit(trainer, train, validation, settings)
    assert trained.flat
    assert len(trained.epochs) == trained.best_epoch + 4 < 200
    best = trained.epochs[trained.best_epoch - 1]
    assert all(epoch.validation_loss >= best.validation_loss - settings.min_delta for epoch in trained.epochs)
    assert trainer.evaluate(validation) == (best.validation_loss, best.validation_accuracy)


def test_training_stops_at_the_limit() -> None:
    settings = TrainSettings(learning_rate=1e-3, max_epochs=3, patience=10, min_delta=0.0)
    trained = fit(Trainer(model(), cross_entropy, settings, None), data(60, 1), data(60, 2), settings)
    assert (len(trained.epochs), trained.flat) == (3, False)


def test_the_seed_decides_the_order() -> None:
    def vector(seed: int) -> np.ndarray:
        settings = TrainSettings(learning_rate=0.1, max_epochs=2, seed=seed)
        trainer = Trainer(model(), cross_entropy, settings, None)
        fit(trainer, data(60, 1), data(60, 2), settings)
        return parameter_vector(trainer.module)

    assert (vector(1) == vector(1)).all()
    assert (vector(1) != vector(2)).any()


def test_evaluation_is_over_all_examples() -> None:
    trainer = Trainer(model(), cross_entropy, TrainSettings(learning_rate=0.1), None)
    examples = data(2 * EVALUATE_BATCH + 3, 1)
    logits = trainer.module(torch.from_numpy(examples.x)).detach()
    loss, accuracy = trainer.evaluate(examples)
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(examples.y).long()).item()
    assert loss == pytest.approx(expected, abs=1e-6)
    assert accuracy == (logits.argmax(dim=1).numpy() == examples.y).mean()


def test_tokens_are_counted_where_there_is_one_and_values_not_at_all() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
    settings = TrainSettings(learning_rate=0.1)
    x = np.arange(12, dtype=np.int32).reshape(4, 3) % 5
    tokens = Trainer(module, next_token, settings, None)
    said = module(torch.from_numpy(x)).argmax(dim=-1).numpy().astype(np.int32)
    # One wrong, one not asked for.
    y = said.copy()
    y[0, 0], y[1, 1] = (said[0, 0] + 1) % 5, -1
    _, accuracy = tokens.evaluate(Examples(x=x, y=y))
    assert accuracy == 10 / 11
    inputs = np.ones((4, 2), np.float32)
    loss, accuracy = Trainer(torch.nn.Linear(2, 1), squared_error, settings, None).evaluate(
        Examples(x=inputs, y=np.zeros((4, 1), np.float32))
    )
    assert loss > 0.0
    assert accuracy == 0.0


def test_a_loss_that_is_not_finite_is_told() -> None:
    settings = TrainSettings(learning_rate=1e38)
    with pytest.raises(InvalidInput, match=r"in epoch \d+, expected a finite one; lower the learning rate \(1e\+38\)"):
        fit(Trainer(model(), cross_entropy, settings, None), data(60, 1), data(60, 2), settings)
