"""The privacy floor of a device: the least that a Round must promise before the device takes part.

A floor has two sources, which both hold: the signed manifest of a Bundle, and the owner of the device. So an owner
tightens the floor of a manifest, and never loosens it. A device checks the owner's floor before it downloads anything,
and that of the manifest as soon as the manifest is verified.

What the check can know differs. A device clips its own change, and it enforces the masks itself: it hides its Update in
the sum, or sends none. NoiseTerms that the coordinator adds (``central``) is a promise of the coordinator.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Final, Protocol

from fanin.edge.masking.parameters import MILLION, Assumptions, Threat
from fanin.edge.masking.settings import LEAST_BITS, MAX_BITS, MaskSettings
from fanin.edge.masking.terms import LEAST_SURVIVORS, MAX_DEVICES, MaskFloor
from fanin.edge.queries.digits import MAX_DEVICES as MOST_DEVICES
from fanin.edge.queries.query import LEAST_DEVICES, StatisticsQuery
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import CLIP_BITS, EXAMPLES, Assignment
from fanin.protos.names import check_key
from fanin.protos.plans import CENTRAL, GAUSSIAN_SHARES, SECAGG_PROTOCOL, SKELLAM, RoundPlan
from fanin.protos.plans.keys import Key, KeyField, keys_of, shown
from fanin.protos.plans.privacy import MAX_EPSILON

REFUSE: Final = "refuse"
BELOW_FLOOR: Final = "FN-1700"
POLICY_CODES: Final = frozenset({BELOW_FLOOR, "FN-1628", "FN-1701", "FN-1702", "FN-1704"})
"""The codes with which a device refuses a Run by its policy: it would refuse the next Round, too."""
DISTRIBUTED: Final = "distributed"
NO_THREAT: Final = ""
THREATS: Final[Mapping[str, Threat]] = MappingProxyType({threat.title: threat for threat in Threat})
STRENGTHS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 0, CENTRAL: 1, SKELLAM: 2, GAUSSIAN_SHARES: 2, DISTRIBUTED: 2}
)
"""How far a mechanism trusts the coordinator. Mechanisms of a Run and levels of a floor; another one counts as none."""
MAX_CLIP_NORM: Final = 2.0**127
"""Devices compute changes in float32."""
_MASKS: Final = MaskSettings()
_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        "threat": _MASKS.threat,
        "min_survivors": _MASKS.min_survivors,
        "adversarial_fraction": _MASKS.adversarial_fraction,
        "security_bits": _MASKS.security_bits,
    }
)
"""The options of ``secagg`` that a floor can demand, with their defaults."""
MASK_KEYS: Final = ("threat", "min_survivors", "adversarial_fraction", "security_bits", "authority")
"""The keys that are about masks, and need the protocol ``secagg``."""
NOISE_KEYS: Final = ("mechanism", "clip_norm", "noise_multiplier", "epsilon", "delta")
"""The keys that are about differential privacy."""


def _is_key(text: str) -> bool:
    try:
        check_key("authority", text)
    except InvalidInput:
        return False
    return True


class NoiseTerms(Protocol):
    """The differential privacy of a Round: that of an Assignment, or of a Plan."""

    @property
    def mechanism(self) -> str:
        """Who adds the noise; "" for nobody."""
        ...

    @property
    def clip_norm(self) -> float:
        """Largest L2 norm of a device's change."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise in the sum of a Round, divided by the sensitivity."""
        ...

    @property
    def epsilon(self) -> float:
        """The budget of the population, which the coordinator promises not to exceed."""
        ...

    @property
    def delta(self) -> float:
        """The delta of the budget."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyFloor:
    """The least privacy of a Round. Each default demands nothing; docs/howto/privacy-floor.md lists the keys.

    Raises:
        InvalidInput: A value is out of its range, or lacks another one.

    Example:
        ``PrivacyFloor(protocol="secagg", min_survivors=20, mechanism="central", clip_norm=1.0, noise_multiplier=0.8)``
    """

    protocol: Annotated[
        str,
        Key(
            text="`secagg`: the coordinator learns the sum of the Updates alone. Empty: any protocol.",
            choices=("", SECAGG_PROTOCOL),
        ),
    ] = ""
    threat: Annotated[
        str, Key(text="The weakest threat model of `secagg`.", choices=(NO_THREAT, *(each.title for each in Threat)))
    ] = NO_THREAT
    min_survivors: Annotated[
        int,
        Key(text="The fewest devices of a sum.", unit="devices", at_least=LEAST_SURVIVORS, at_most=MAX_DEVICES),
    ] = 0
    adversarial_fraction: Annotated[
        float,
        Key(
            text="The smallest fraction of devices that help the coordinator, against which the masks must hold.",
            above=0,
            below=1,
        ),
    ] = 0.0
    security_bits: Annotated[
        int,
        Key(text="The fewest security bits.", unit="bits", at_least=LEAST_BITS, at_most=MAX_BITS),
    ] = 0
    authority: Annotated[
        str,
        Key(
            text="Public Ed25519 key that certifies devices under the threat model `active`.",
            form="64 hexadecimal characters of a public key",
            is_valid=_is_key,
        ),
    ] = ""
    mechanism: Annotated[
        str,
        Key(
            text="`central`: noise for differential privacy, also by the coordinator. `distributed`: noise by the "
            "devices. Empty: none is needed.",
            choices=("", CENTRAL, DISTRIBUTED),
        ),
    ] = ""
    clip_norm: Annotated[
        float, Key(text="The largest L2 norm of a device's change.", above=0, at_most=MAX_CLIP_NORM)
    ] = math.inf
    noise_multiplier: Annotated[
        float,
        Key(
            text="The smallest standard deviation of the noise in a sum, divided by the largest influence of one "
            "device. It needs `mechanism`.",
            above=0,
            at_most=1000,
        ),
    ] = 0.0
    epsilon: Annotated[
        float,
        Key(text="The largest budget of the population that a Round is charged to.", above=0, at_most=MAX_EPSILON),
    ] = math.inf
    delta: Annotated[float, Key(text="The largest delta of this budget.", above=0, below=1)] = 1.0

    statistics: Annotated[
        str,
        Key(
            text="`refuse`: no counts of the examples for a statistics Run. Empty: any query of a trusted publisher.",
            choices=("", REFUSE),
        ),
    ] = ""
    min_cell_devices: Annotated[
        int,
        Key(
            text="The fewest devices of a cell that a statistics Run publishes.",
            unit="devices",
            at_least=LEAST_DEVICES,
            at_most=MOST_DEVICES,
        ),
    ] = 0

    def __post_init__(self) -> None:
        for key in floor_keys():
            value = getattr(self, key.name)
            if value != key.default and not key.accepts(value):
                raise InvalidInput(f"{key.name}: got {shown(value)}, expected {key.expected}", code="FN-1701")
        if problem := _problem(self):
            raise InvalidInput(problem, code="FN-1701")

    @property
    def masks(self) -> MaskFloor | None:
        """The part about masks, for ``fanin.edge.masking``; None if the floor accepts Rounds without masks."""
        if self.protocol != SECAGG_PROTOCOL:
            return None
        return MaskFloor(
            threat=THREATS.get(self.threat, Threat.CURIOUS),
            min_survivors=max(self.min_survivors, LEAST_SURVIVORS),
            adversarial_ppm=round(self.adversarial_fraction * MILLION),
            security_bits=max(self.security_bits, LEAST_BITS),
            authority=self.authority,
        )

    def values(self) -> dict[str, object]:
        """Return the values that demand something, by key."""
        return {key.name: getattr(self, key.name) for key in floor_keys() if getattr(self, key.name) != key.default}

    def tightened(self, other: "PrivacyFloor") -> "PrivacyFloor":
        """Return the floor that satisfies both.

        Raises:
            InvalidInput: They name different authorities, and a device can trust only one.
        """
        if self.authority and other.authority and self.authority != other.authority:
            raise InvalidInput(
                f"privacy floor: got the authorities {self.authority} and {other.authority}, expected one; remove "
                "authority from policy.toml, or ask the publisher for a bundle with yours",
                code="FN-1702",
            )
        return PrivacyFloor(
            protocol=self.protocol or other.protocol,
            threat=max(self.threat, other.threat, key=lambda name: THREATS.get(name, 0)),
            min_survivors=max(self.min_survivors, other.min_survivors),
            adversarial_fraction=max(self.adversarial_fraction, other.adversarial_fraction),
            security_bits=max(self.security_bits, other.security_bits),
            authority=self.authority or other.authority,
            mechanism=max(self.mechanism, other.mechanism, key=STRENGTHS.__getitem__),
            clip_norm=min(self.clip_norm, other.clip_norm),
            noise_multiplier=max(self.noise_multiplier, other.noise_multiplier),
            statistics=self.statistics or other.statistics,
            min_cell_devices=max(self.min_cell_devices, other.min_cell_devices),
            epsilon=min(self.epsilon, other.epsilon),
            delta=min(self.delta, other.delta),
        )

    def faults(self, protocol: RoundPlan, noise: NoiseTerms | None) -> tuple[str, ...]:
        """Return what a Round promises less than the floor; empty if the device may take part.

        Args:
            protocol: The protocol of the Round. An option that is missing has its default.
            noise: Its differential privacy; None for none.
        """
        return (*self._protocol_faults(protocol), *self._noise_faults(noise))

    def check(self, work: Assignment, origin: str) -> None:
        """Raise InvalidPlan if an Assignment promises less than the floor. ``origin`` is whose floor it is."""
        faults = self.faults(work.round_protocol, work.privacy) or self._other_faults(work)
        if faults:
            raise InvalidPlan(f"privacy floor of {origin}: got {'; '.join(faults)}", code=BELOW_FLOOR)

    def check_query(self, query: StatisticsQuery | None) -> None:
        """Raise InvalidPlan if a Bundle asks for statistics that the floor does not allow. None: it asks for none."""
        if query is None:
            return
        if self.statistics == REFUSE:
            fault = "statistics of the examples, expected a model to train"
        elif query.min_devices < self.min_cell_devices:
            fault = f"cells of {query.min_devices} devices, expected at least {self.min_cell_devices}"
        else:
            return
        raise InvalidPlan(f"privacy floor: got {fault}", code=BELOW_FLOOR)

    def _other_faults(self, work: Assignment) -> tuple[str, ...]:
        """Return what an Assignment asks for beside the noised sum, which a floor with noise does not allow."""
        if not self.values().keys() & set(NOISE_KEYS):
            return ()
        has_noise = work.privacy is not None and work.privacy.bits_noise > 0
        noised = (EXAMPLES, CLIP_BITS) if has_noise else (EXAMPLES,)
        others = [each.name for each in work.statistics if each.name not in noised or each.bound > 1]
        others += ["ranges of activations"] * bool(work.range_examples)
        return (f"{', '.join(others)} without noise, expected the noised sum alone",) if others else ()

    def _protocol_faults(self, protocol: RoundPlan) -> tuple[str, ...]:
        masks = self.masks
        if masks is None:
            return ()
        if protocol.protocol != SECAGG_PROTOCOL:
            return (f"round protocol {protocol.protocol}, expected {SECAGG_PROTOCOL}",)
        assumptions, min_survivors = promised_masks(protocol.options)
        return masks.faults(assumptions, min_survivors)

    def _noise_faults(self, noise: NoiseTerms | None) -> tuple[str, ...]:
        if noise is None or not noise.mechanism:
            demands = {name: value for name, value in self.values().items() if name in NOISE_KEYS}
            return (f"no differential privacy, expected {demands_text(demands)}",) if demands else ()
        rows = []
        if STRENGTHS.get(noise.mechanism, 0) < STRENGTHS[self.mechanism]:
            rows.append(f"mechanism {shown(noise.mechanism)}, expected {self.mechanism}")
        if not noise.clip_norm <= self.clip_norm:
            rows.append(f"clip norm {noise.clip_norm:g}, expected at most {self.clip_norm:g}")
        if not noise.noise_multiplier >= self.noise_multiplier:
            rows.append(f"noise multiplier {noise.noise_multiplier:g}, expected at least {self.noise_multiplier:g}")
        for name in ("epsilon", "delta"):
            value, largest = getattr(noise, name), getattr(self, name)
            if not value <= largest:
                rows.append(f"{name} {value:g} of the budget, expected at most {largest:g}")
        return tuple(rows)


def demands_text(values: Mapping[str, object]) -> str:
    """Return keys and values on one line."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in values.items())


def value_text(value: object) -> str:
    """Return the value of a key for people."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def origins(floors: Mapping[str, PrivacyFloor]) -> dict[str, tuple[object, tuple[str, ...]]]:
    """Return the values in force, each with the names of the floors that demand it, by key.

    Args:
        floors: The floors that hold together, by the name of their origin.

    Raises:
        InvalidInput: Two of them name different authorities.
    """
    floor = NO_FLOOR
    for each in floors.values():
        floor = floor.tightened(each)
    rows = {}
    for name, value in floor.values().items():
        rows[name] = (value, tuple(origin for origin, each in floors.items() if getattr(each, name) == value))
    return rows


def floor_keys() -> tuple[KeyField, ...]:
    """Return the declarations of the keys."""
    return tuple(keys_of(PrivacyFloor))


def promised_masks(options: Mapping[str, object]) -> tuple[Assumptions, int]:
    """Return what the options of ``secagg`` promise, and the least number of survivors.

    An option that is missing has its default, and one of a wrong type counts as its weakest value.
    """
    values: dict[str, object] = {name: options.get(name, default) for name, default in _DEFAULTS.items()}
    threat, survivors, fraction, bits = values.values()
    is_fraction = isinstance(fraction, float) and 0.0 <= fraction < 1.0
    assumptions = Assumptions(
        threat=THREATS.get(threat, Threat.CURIOUS) if isinstance(threat, str) else Threat.CURIOUS,
        adversarial_ppm=round(fraction * MILLION) if isinstance(fraction, float) and is_fraction else 0,
        dropout_ppm=0,
        security_bits=bits if isinstance(bits, int) else 0,
    )
    return assumptions, survivors if isinstance(survivors, int) else 0


def _problem(floor: PrivacyFloor) -> str:
    """Return the text of the error for keys that contradict each other; "" if none do."""
    names = {field.name for field in fields(floor)} & floor.values().keys()
    alone = [name for name in MASK_KEYS if name in names]
    if alone and not floor.protocol:
        return f'{alone[0]}: got it without protocol, expected protocol = "{SECAGG_PROTOCOL}" with it'
    if floor.noise_multiplier and not floor.mechanism:
        return (
            f'noise_multiplier: got it without mechanism, expected mechanism = "{CENTRAL}" or "{DISTRIBUTED}" with it'
        )
    return ""


NO_FLOOR: Final = PrivacyFloor()
