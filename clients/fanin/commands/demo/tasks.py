"""What the demo can train: for each data set its split, its App, and the settings that suit it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fanin.clients.data.digits import split_digits
from fanin.clients.data.examples import Split
from fanin.clients.data.public import split_fashion_mnist
from fanin.datacenter.jobs.settings import LayoutSettings
from fanin.datacenter.models.digits_app import app as digits_app
from fanin.datacenter.models.fashion_app import HIDDEN
from fanin.datacenter.models.fashion_app import app as fashion_app
from fanin.edge.export import App


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How the datacenter trains once: to a validation loss that was flat for ``patience`` epochs."""

    learning_rate: float
    batch_size: int = 16
    max_epochs: int = 100
    patience: int = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One data set and how it is trained.

    ``split`` maps (devices, alpha, seed) to its parts; ``where`` is the App as a job of the datacenter finds it,
    ``app`` the same for a seed, ``layout`` says where its module is cut and what of it is split. ``pretrain``,
    ``second_turn`` and ``centralised`` are the datacenter's settings; the devices' are ``local_epochs`` and
    ``local_learning_rate``, for at most ``max_rounds`` by default.
    """

    noun: str
    split: Callable[[int, float, int], Split]
    where: str
    app: Callable[[int], App]
    layout: LayoutSettings
    pretrain: Turn
    second_turn: Turn
    centralised: Turn
    local_epochs: int
    local_learning_rate: float
    max_rounds: int


FROM_SCRATCH: Final = Turn(learning_rate=0.05)
TASKS: Final[Mapping[str, Task]] = MappingProxyType(
    {
        "digits": Task(
            noun="digits",
            split=split_digits,
            where="fanin.datacenter.models.digits_app:app",
            app=digits_app,
            # Its one matrix is split by classes; convolutions are whole on every rank, as what no pattern names is.
            layout=LayoutSettings(
                layers="convolutions", num_layers=2, outputs=("flatten", "head"), plan={"head": "logits"}
            ),
            pretrain=FROM_SCRATCH,
            # A few gentle epochs: on 100 digits more would undo what the devices' 1,157 taught.
            second_turn=Turn(learning_rate=0.01, max_epochs=10, patience=3),
            centralised=FROM_SCRATCH,
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
            pretrain=Turn(learning_rate=0.02, max_epochs=20, patience=5),
            second_turn=Turn(learning_rate=0.002, max_epochs=3, patience=3),
            centralised=Turn(learning_rate=0.05, batch_size=64, max_epochs=8, patience=2),
            local_epochs=1,
            local_learning_rate=0.02,
            max_rounds=10,
        ),
    }
)
