"""A row of a simulation for the tests of its text."""

from fanin.simulation import RoundRow

NAN = float("nan")
ROW = RoundRow(
    seed=0,
    round=2,
    version=2,
    time_s=1.0,
    num_clients=3,
    num_examples=9,
    train_loss=0.5,
    train_loss_examples=9,
    test_loss=0.25,
    test_accuracy=0.75,
    test_accuracy_int8=NAN,
    bytes_down=1,
    bytes_up=1,
    validation_loss=NAN,
    validation_accuracy=NAN,
    validation_accuracy_int8=NAN,
    statistics={},
    means={},
    metrics={"balanced_accuracy": 0.625, "unknown": NAN},
    strategy_metrics={},
    num_diverged=0,
    num_saturated=0,
    num_saturated_clients=0,
    num_clamped=0,
)
