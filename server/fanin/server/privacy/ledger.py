"""The ledger of a population: the text of a row, and the check before the next release.

A row is durable before its release leaves the coordinator. A row that cannot be read is an error, never a row that is
left out: epsilon would be too small.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from fanin.edge.noise.loss import Loss
from fanin.protos.errors import InvalidInput
from fanin.server.privacy.accounting import Entry, epsilon
from fanin.server.privacy.releases import NoisedSum, PlainRelease, SampledRelease

FORM: Final = 1
MAX_SHOWN: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The largest epsilon of a population at a delta."""

    epsilon: float
    delta: float

    def after(self, ledger: Iterable[Entry], following: Entry) -> tuple[float, str]:
        """Return epsilon of the ledger with the next releases added, and why they must not happen.

        Args:
            ledger: All rows of the population, of all its Runs, equal ones as one entry with their count.
            following: A release that has not left the coordinator, and how often.

        Returns:
            Epsilon, and the excess over the budget for operators, empty if it is kept.

        Raises:
            RuntimeMissing: The extra ``privacy`` is not installed.
        """
        entries = list(ledger)
        after = epsilon([*entries, following], self.delta)
        if after <= self.epsilon:
            return after, ""
        return after, (
            f"privacy budget: got epsilon {after:.6g} after the next release ({epsilon(entries, self.delta):.6g} "
            f"before it), expected at most {self.epsilon:g} at delta {self.delta:g}; end the training here"
        )


def to_text(release: PlainRelease | SampledRelease) -> str:
    """Return the text of a row: exact, and one text for each release."""
    fields: dict[str, object]
    if isinstance(release, PlainRelease):
        fields = {"rho": str(release.loss.rho), "xi": str(release.loss.xi)}
    else:
        sums = [{"norm2": each.squared_sensitivity, "sigma2": str(each.parameter)} for each in release.sums]
        fields = {"sums": sums, "rate": release.sampling_rate.hex()}
    return json.dumps({"form": FORM, **fields}, sort_keys=True, separators=(",", ":"))


def from_text(text: str) -> PlainRelease | SampledRelease:
    """Return the release of a row.

    Raises:
        InvalidInput: This is not the text of a release.
    """
    try:
        release = _release(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError) as exc:
        raise _damaged(text) from exc
    # One text for each release: a row that was edited by hand, or has more fields, is damaged.
    if to_text(release) != text:
        raise _damaged(text)
    return release


def _release(fields: Mapping[str, object]) -> PlainRelease | SampledRelease:
    if "sums" not in fields:
        return PlainRelease(loss=Loss(rho=_fraction(fields["rho"]), xi=_fraction(fields["xi"])))
    listed, rate = fields["sums"], fields["rate"]
    if not isinstance(listed, list) or not isinstance(rate, str):
        raise TypeError
    sums = [NoisedSum(squared_sensitivity=int(each["norm2"]), parameter=_fraction(each["sigma2"])) for each in listed]
    return SampledRelease(sums=tuple(sums), sampling_rate=float.fromhex(rate))


def _fraction(value: object) -> Fraction:
    if not isinstance(value, str):
        raise TypeError
    return Fraction(value)


def _damaged(text: str) -> InvalidInput:
    return InvalidInput(
        f"privacy ledger: got the row {text[:MAX_SHOWN]!r}, expected a release of form {FORM}; restore the database "
        "from a backup, because epsilon is not known without this row",
        code="FN-1661",
    )
