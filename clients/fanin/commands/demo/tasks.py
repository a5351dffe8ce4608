"""The tasks of the demo: for each data set its split, its App and suitable settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fanin.clients.data.digits import split_digits
from fanin.clients.data.examples import Split
from fanin.clients.data.public import split_fashion_mnist
from fanin.datacenter.config.settings import LayoutSettings
from fanin.datacenter.models.digits_app import app as digits_app
from fanin.datacenter.models.fashion_app import HIDDEN
from fanin.datacenter.models.fashion_app import app as fashion_app
from fanin.edge.export import App


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPhase:
    """One training in the datacenter, until the validation loss is flat for ``patience`` epochs."""

    learning_rate: float
    batch_size: int = 16
    max_epochs: int = 100
    patience: int = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One data set and its training.

    Attributes:
        noun: The word for its examples.
        split: Maps (devices, alpha, seed) to the parts of the data.
        where: The App's import path, for a job of the datacenter.
        app: Creates the App for a seed.
        layout: How the module is cut into stages and split over ranks.
        pretrain: The first training in the datacenter.
        second_turn: The training after the federation.
        centralised: The training on all data in one place.
        local_epochs: Epochs of a device in a Round.
        local_learning_rate: Learning rate of a device.
        max_rounds: Default limit of the Rounds.
    """

    noun: str
    split: Callable[[int, float, int], Split]
    where: str
    app: Callable[[int], App]
    layout: LayoutSettings
    pretrain: TrainingPhase
    second_turn: TrainingPhase
    centralised: TrainingPhase
    local_epochs: int
    local_learning_rate: float
    max_rounds: int


FROM_SCRATCH: Final = TrainingPhase(learning_rate=0.05)
TASKS: Final[Mapping[str, Task]] = MappingProxyType(
    {
        "digits": Task(
            noun="digits",
            split=split_digits,
            where="fanin.datacenter.models.digits_app:app",
            app=digits_app,
            # The one matrix is split by classes. Every rank has all convolutions, because no pattern names them.
            layout=LayoutSettings(
                layers="convolutions", num_layers=2, outputs=("flatten", "head"), plan={"head": "logits"}
            ),
            pretrain=FROM_SCRATCH,
            # A few gentle epochs: more on 100 digits would undo the training on the devices' 1,157.
            second_turn=TrainingPhase(learning_rate=0.01, max_epochs=10, patience=3),
            # Twelve times as many digits need larger batches and fewer epochs.
            centralised=TrainingPhase(learning_rate=0.1, batch_size=32, patience=5),
            local_epochs=5,
            local_learning_rate=0.1,
            max_rounds=20,
        ),
        "fashion-mnist": Task(
            noun="images",
            split=split_fashion_mnist,
            where="fanin.datacenter.models.fashion_app:app",
            app=fashion_app,
            layout=LayoutSettings(
                layers="convolutions",
                num_layers=2,
                outputs=("flatten", "hidden", "head"),
                plan={"hidden.0": "column", "head": "row"},
                feed_forward=HIDDEN,
            ),
            pretrain=TrainingPhase(learning_rate=0.02, max_epochs=20, patience=5),
            second_turn=TrainingPhase(learning_rate=0.002, max_epochs=3, patience=3),
            centralised=TrainingPhase(learning_rate=0.05, batch_size=64, max_epochs=8, patience=2),
            local_epochs=1,
            local_learning_rate=0.02,
            max_rounds=10,
        ),
    }
)
