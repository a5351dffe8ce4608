"""The options of ``fanin simulate`` and ``fanin partition`` that choose a data set and spread it over clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from fanin.clients import FineTuning
from fanin.commands.console.usage import wrong_usage
from fanin.protos.errors import InvalidInput
from fanin.simulation import LoadedData, Natural, Partition, Partitioner, load_data, partition
from fanin.simulation.data.loading import check_name

if TYPE_CHECKING:
    from fanin.simulation import SimulationSettings

DEFAULT_ALPHA: Final = 0.3
WITH_ALPHA: Final = ("dirichlet", "label_skew", "quantity")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationData:
    """The options that choose a data set and spread it over clients."""

    data: str
    num_clients: int
    by: str
    alpha: float | None
    options: Sequence[str]

    def load(self, seed: int) -> tuple[LoadedData, Partition]:
        """Return the data set, and the examples of each client.

        Raises:
            InvalidInput: The data set cannot be read.
            WrongUsage: An option is wrong, or clients have no examples.
        """
        with wrong_usage():
            check_name(self.data)
        loaded = load_data(self.data, seed=seed)
        with wrong_usage():
            return loaded, partition(loaded.train, self.num_clients, self._partitioner(loaded), seed=seed)

    def _partitioner(self, loaded: LoadedData) -> Partitioner:
        from fanin.simulation.data.partitioners import partitioner_of

        values = dict(map(_option, self.options))
        if self.alpha is not None or (self.by in WITH_ALPHA and "alpha" not in values):
            values["alpha"] = DEFAULT_ALPHA if self.alpha is None else self.alpha
        if self.by == "natural" and loaded.ids is not None and not values:
            return Natural(ids=loaded.ids)
        return partitioner_of(self.by, values)


def with_tests(
    settings: "SimulationSettings", clients: Partition, share: float, epochs: int
) -> "tuple[Partition, SimulationSettings]":
    """Return the clients without their own test examples, and the settings with them.

    Args:
        settings: The settings.
        clients: The examples of the clients.
        share: The share of test examples; 0 for none.
        epochs: Epochs of the fine-tuning; 0 for none.

    Raises:
        WrongUsage: The share is wrong, or a client has too few examples. Or there is a fine-tuning without a share.
    """
    with wrong_usage():
        if epochs and not share:
            raise InvalidInput(
                "--fine-tune: got it without --client-test, expected test examples of each client; add --client-test "
                "0.2",
                code="FN-1837",
            )
        if not share:
            return clients, settings
        train, test = clients.split(share, settings.seed)
        fine_tune = FineTuning(epochs=epochs) if epochs else None
    return train, replace(settings, client_test=test, fine_tune=fine_tune)


def _option(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not equals or not name or not math.isfinite(value):
        raise InvalidInput(f"--option {text}: expected NAME=NUMBER, for example --option per_client=2", code="FN-1008")
    return name, value
