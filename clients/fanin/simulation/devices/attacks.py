"""Attacks of simulated devices, for the evaluation of aggregation rules: valid Updates with malicious values.

A coordinator cannot tell these Updates from those of other data, unlike a ``Lie`` of ``habits``. An attack has up to
three parts: other examples, another change of the trained parameters, and another header. Running statistics and
counters stay as they are: a negative variance would reveal the device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.errors import InvalidInput, SubjectError
from fanin.protos.messages import SATURATED, Statistics, UpdateHeader
from fanin.protos.numbers import is_number

LARGEST: Final = float(np.finfo(np.float32).max)
X: Final = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class HonestUpdates:
    """What colluding attackers know of the honest Updates of a Round.

    Attributes:
        mean: The mean of the changes of the trained parameters (num_trained,).
        deviation: Their standard deviation, with the divisor n - 1 (num_trained,). Zero for one Update.
        num_honest: n, the number of honest devices.
        num_attackers: The number of attackers.
    """

    mean: Float64s
    deviation: Float64s
    num_honest: int
    num_attackers: int


class Attack:
    """Base class of attacks. Each method returns what an honest device has; an attack overrides some of them."""

    colludes: ClassVar[bool] = False
    """Whether ``collude`` replaces the change, from the honest Updates of the Round."""
    poisons: ClassVar[bool] = False
    """Whether ``examples`` changes the data of the device."""

    @property
    def extreme(self) -> float | None:
        """The magnitude that the device reports as the range of each activation; None: the measured range."""
        return None

    def examples(self, own: Examples, num_classes: int) -> Examples:
        """Return the examples that the device trains on. Raises InvalidInput if the attack does not fit them."""
        return own

    def change(self, own: Float32s) -> Float64s:
        """Return the change of the trained parameters, from the device's own (num_trained,)."""
        return own.astype(np.float64)

    def collude(self, honest: HonestUpdates) -> Float64s:
        """Return the change of the trained parameters, from those of the honest devices (num_trained,)."""
        raise AssertionError("only an attack that colludes is called")

    def header(self, header: UpdateHeader) -> UpdateHeader:
        """Return the header that the device sends."""
        return header


@dataclass(frozen=True, slots=True, kw_only=True)
class SignFlip(Attack):
    """The device sends the opposite of its own change: -``factor`` x.

    Attributes:
        factor: Size of the change, as a multiple of the honest one.

    Reference:
        Allen-Zhu et al. 2021, Byzantine-Resilient Non-Convex Stochastic Gradient Descent, ICLR.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("sign flip", factor=self.factor)

    def change(self, own: Float32s) -> Float64s:
        """See Attack."""
        return own.astype(np.float64) * -self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling(Attack):
    """The device sends a multiple of its own change: ``factor`` x.

    With the total weight of a Round divided by its own one as ``factor``, it replaces the model by its own.

    Reference:
        Bagdasaryan et al. 2020, How To Backdoor Federated Learning, arXiv 1807.00459, section 4.2.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        _check_positive("scaling", factor=self.factor)

    def change(self, own: Float32s) -> Float64s:
        """See Attack."""
        return own.astype(np.float64) * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFlip(Attack):
    """The device trains on wrong labels: C - 1 - y instead of y, for C classes.

    Reference:
        Fang et al. 2020, Local Model Poisoning Attacks to Byzantine-Robust Federated Learning, arXiv 1911.11815.
    """

    poisons: ClassVar[bool] = True

    def examples(self, own: Examples, num_classes: int) -> Examples:
        """See Attack."""
        check_labels("label_flip", own)
        return Examples(inputs=own.inputs, y=np.int32(num_classes - 1) - own.y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alie(Attack):
    """A little is enough: all attackers send the mean of the honest changes, shifted within their deviation.

        mean + z deviation        z = quantile of the normal distribution at (n - f - s) / (n - f)
                                  s = floor(n / 2 + 1) - f

    n is the number of devices and f that of attackers. s honest devices are then farther from the mean than the
    attackers, so that a majority seems to support them. In the paper the attackers estimate mean and deviation by their
    own honest Updates. Here they know those of the honest devices, as in byzfl.

    Attributes:
        z: The shift in deviations, also below 0; None: that of the paper.

    Reference:
        Baruch, Baruch, Goldberg 2019, A Little Is Enough: Circumventing Defenses For Distributed Learning,
        arXiv 1902.06156, section 3 and algorithm 3.
    """

    colludes: ClassVar[bool] = True
    z: float | None = None

    def __post_init__(self) -> None:
        if self.z is not None and not (is_number(self.z) and math.isfinite(self.z)):
            raise SubjectError("alie", f"got z {self.z!r}, expected a finite number")

    def collude(self, honest: HonestUpdates) -> Float64s:
        """See Attack."""
        z = largest_shift(honest.num_honest, honest.num_attackers) if self.z is None else self.z
        return honest.mean + z * honest.deviation


def largest_shift(num_honest: int, num_attackers: int) -> float:
    """Return z of ``Alie``. One honest device must be on the attackers' side, also if they are the majority."""
    num_devices = num_honest + num_attackers
    supporters = max(num_devices // 2 + 1 - num_attackers, 1)
    share = (num_honest - supporters) / num_honest
    return NormalDist().inv_cdf(share) if share > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerProduct(Attack):
    """Inner-product manipulation: all attackers send -``epsilon`` times the mean of the honest changes.

    Its inner product with the mean is negative, so the aggregate of a rule that includes it may have a negative one.
    With ``epsilon`` 1 it is the sign flip of byzfl.

    Reference:
        Xie, Koyejo, Gupta 2020, Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation,
        arXiv 1903.03936, section 4.
    """

    colludes: ClassVar[bool] = True
    epsilon: float = 0.5

    def __post_init__(self) -> None:
        _check_positive("inner product", epsilon=self.epsilon)

    def collude(self, honest: HonestUpdates) -> Float64s:
        """See Attack."""
        return honest.mean * -self.epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class Backdoor(Attack):
    """The device trains on examples with a trigger, all of one label, and sends a multiple of its change.

    The trigger is a square in the last rows and columns of the input ``x``, or its last values if an example has one
    axis. ``triggered`` returns test examples, on which the accuracy is the success of the attack.

    Attributes:
        target: The label of examples with the trigger.
        size: Rows and columns of the trigger.
        value: The values of the trigger.
        share: Share of the device's examples with the trigger.
        factor: Size of the change, as a multiple of the trained one: n / f replaces the model if f of n devices with
            equal weights attack.

    Reference:
        Bagdasaryan et al. 2020, How To Backdoor Federated Learning, arXiv 1807.00459, sections 4.1 and 4.2. Gu,
        Dolan-Gavitt, Garg 2017, BadNets, arXiv 1708.06733, has the trigger.
    """

    poisons: ClassVar[bool] = True
    target: int
    size: int = 3
    value: float = 1.0
    share: float = 0.5
    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("backdoor", factor=self.factor, share=self.share, size=self.size)
        if not (is_number(self.value) and math.isfinite(self.value)):
            raise SubjectError("backdoor", f"got value {self.value!r}, expected a finite number")
        if self.share > 1.0 or self.target != int(self.target) or self.target < 0 or self.size != int(self.size):
            raise SubjectError(
                "backdoor",
                f"got share {self.share!r}, target {self.target!r} and size {self.size!r}, expected a share above 0 up "
                "to 1, a label, and whole pixels",
            )

    def examples(self, own: Examples, num_classes: int) -> Examples:
        """See Attack."""
        if self.target >= num_classes:
            raise InvalidInput(
                f"attackers: backdoor: got target {self.target}, expected a label from 0 to {num_classes - 1}",
                code="FN-1851",
            )
        number = np.arange(len(own), dtype=np.float64)
        rows = np.flatnonzero(np.floor((number + 1.0) * self.share) > np.floor(number * self.share))
        return self._with_trigger(own, rows)

    def change(self, own: Float32s) -> Float64s:
        """See Attack."""
        return own.astype(np.float64) * self.factor

    def triggered(self, test: Examples) -> Examples:
        """Return the test examples of all other labels, with the trigger and the target as label."""
        others = np.flatnonzero(test.y != self.target)
        return self._with_trigger(test.take(others), np.arange(others.size))

    def _with_trigger(self, examples: Examples, rows: np.ndarray) -> Examples:
        check_labels("backdoor", examples)
        x = examples.inputs.get(X)
        if x is None or x.ndim < 2:
            raise InvalidInput(
                f"attackers: backdoor: got the inputs {', '.join(sorted(examples.inputs))} without values of an "
                f"example in {X!r}, expected images or rows in {X!r}; use another attack",
                code="FN-1851",
            )
        images, labels = x.copy(), examples.y.copy()
        place = (slice(-int(self.size), None),) * min(x.ndim - 1, 2)
        patched = images[rows]
        patched[(..., *place)] = self.value
        images[rows] = patched
        labels[rows] = int(self.target)
        return Examples(inputs={**examples.inputs, X: images}, y=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridManipulation(Attack):
    """The device tries to move the grid: each value of its change, and each range that it reports, has one size.

    A large size asks for a coarse grid, on which honest changes are zeros. A small one asks for a fine grid, on which
    they saturate (docs/howto/rules.md).

    Attributes:
        size: The magnitude of all values.
        saturated: The number of saturated values that it reports; None: that of its Update.
    """

    size: float = 1e30
    saturated: int | None = None

    def __post_init__(self) -> None:
        _check_positive("grid manipulation", size=self.size)
        if self.saturated is not None and not (is_number(self.saturated) and self.saturated >= 0):
            raise SubjectError("grid manipulation", f"got saturated {self.saturated!r}, expected a count from 0 on")

    @property
    def extreme(self) -> float | None:
        """See Attack."""
        return self.size

    def change(self, own: Float32s) -> Float64s:
        """See Attack."""
        return np.full(own.size, self.size)

    def header(self, header: UpdateHeader) -> UpdateHeader:
        """See Attack."""
        if self.saturated is None or SATURATED not in header.statistics.counts:
            return header
        counts = {**header.statistics.counts, SATURATED: int(self.saturated)}
        return replace(header, statistics=Statistics(counts=MappingProxyType(counts)))


ATTACKS: Final[Mapping[str, Callable[..., Attack]]] = MappingProxyType(
    {
        "sign_flip": SignFlip,
        "scaling": Scaling,
        "label_flip": LabelFlip,
        "alie": Alie,
        "inner_product": InnerProduct,
        "backdoor": Backdoor,
        "grid": GridManipulation,
    }
)
"""The attacks by their name in a file."""


def check_labels(what: str, examples: Examples) -> None:
    """Raise InvalidInput unless the targets of examples are labels."""
    if examples.y.ndim != 1 or examples.y.dtype != np.int32:
        raise InvalidInput(
            f"attackers: {what}: got targets {examples.y.dtype} of shape {examples.y.shape}, expected labels (n,) "
            "int32; use an attack on the change",
            code="FN-1851",
        )


def _check_positive(attack: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not (is_number(number) and 0.0 < number <= LARGEST):
            raise SubjectError(attack, f"got {name} {number!r}, expected a number above 0")
