"""epsilon and delta of a list of releases, composed by ``dp-accounting``.

======================  ==========================================================  ======================
release                 bound                                                       composed by
======================  ==========================================================  ======================
``SampledRelease``      RDP of integer orders, equal to that of a Gaussian of       ``RdpAccountant``
                        real numbers (docs/explanation/differential-privacy.md)
``PlainRelease``        zCDP or RDP, ``alpha * rho + xi``                           ``RdpAccountant``
``GaussianRelease``     privacy loss distribution, rounded to the worse side        ``PLDAccountant``
======================  ==========================================================  ======================

A list with Gaussians of real numbers alone is composed by PLD. As soon as it has another release, all are composed by
RDP: each is a valid bound, and bounds of two accountants cannot be added up.

All results are upper bounds. They are rounded outward by a factor of 1 + 1e-9, which covers the rounding of float64,
and an epsilon of at least one release is never 0. The ledger is a multiset: order does not matter, and adaptivity is
allowed (each release may depend on earlier ones).
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from fanin.edge.noise.loss import OUTWARD
from fanin.edge.tensors import Float64s
from fanin.protos.errors import InvalidInput, RuntimeMissing
from fanin.server.privacy.releases import GaussianRelease, PlainRelease, Release, SampledRelease

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

Entry = tuple[Release, int]
"""A release, and how often it was released."""

LEAST_EPSILON: Final = 1e-6
"""The smallest epsilon that is reported after a release. A true epsilon can be 0 for a large delta, but never by
rounding."""
RDP_ORDERS: Final = (*range(2, 65), *range(72, 129, 8), *range(144, 257, 16), *range(320, 1025, 64))
"""Integer orders, for which the bounds of sampled releases hold. The time of one release is their sum."""
ROUNDING: Final = 1e-12
"""Added to the divergences of a sampled release. It covers the rounding of the logarithm of a sum near 1, which makes a
divergence 0 for a small rate and much noise."""
CACHED_RELEASES: Final = 4096


def epsilon(entries: Iterable[Entry], delta: float) -> float:
    """Return an epsilon such that all releases together are (epsilon, delta)-differentially private.

    Args:
        entries: Releases with their counts.
        delta: Between 0 and 1, both excluded.

    Returns:
        0 without a release, else at least ``LEAST_EPSILON``.

    Raises:
        InvalidInput: ``delta`` is out of range.
        RuntimeMissing: The extra ``privacy`` is not installed.
    """
    if not 0 < delta < 1:
        raise InvalidInput(f"delta: got {delta}, expected a number between 0 and 1, both excluded", code="FN-1650")
    counts = _counts(entries)
    if not counts:
        return 0.0
    library = _library()
    gaussians = _gaussians(counts)
    if gaussians is not None:
        exact = _by_distribution(gaussians).get_epsilon(delta)
    else:
        exact = library.rdp.compute_epsilon(RDP_ORDERS, _divergences(counts), delta)[0]
    return max(float(exact) * OUTWARD, LEAST_EPSILON)


def delta(entries: Iterable[Entry], epsilon: float) -> float:
    """Return a delta such that all releases together are (epsilon, delta)-differentially private.

    Args:
        entries: Releases with their counts.
        epsilon: At least 0.

    Returns:
        0 without a release, and at most 1.

    Raises:
        InvalidInput: ``epsilon`` is negative or not finite.
        RuntimeMissing: The extra ``privacy`` is not installed.
    """
    if not 0 <= epsilon < math.inf:
        raise InvalidInput(f"epsilon: got {epsilon}, expected a finite number of at least 0", code="FN-1651")
    counts = _counts(entries)
    if not counts:
        return 0.0
    library = _library()
    gaussians = _gaussians(counts)
    if gaussians is not None:
        exact = _by_distribution(gaussians).get_delta(epsilon)
    else:
        exact = library.rdp.rdp_privacy_accountant.compute_delta(RDP_ORDERS, _divergences(counts), epsilon)[0]
    return min(float(exact) * OUTWARD, 1.0)


def _library() -> ModuleType:
    try:
        import dp_accounting
    except ModuleNotFoundError as exc:
        raise RuntimeMissing(
            "accounting of differential privacy: got no package dp-accounting, expected the extra privacy; run "
            "pip install 'fanin[privacy]'",
            code="FN-1652",
        ) from exc
    library: ModuleType = dp_accounting
    return library


def _counts(entries: Iterable[Entry]) -> dict[Release, int]:
    counts: dict[Release, int] = {}
    for release, count in entries:
        if count < 0:
            raise ValueError(f"ledger: got {count} releases of {release}, expected at least 0")
        if count:
            counts[release] = counts.get(release, 0) + count
    return counts


def _gaussians(counts: Mapping[Release, int]) -> dict[GaussianRelease, int] | None:
    """Return the releases if all are Gaussians of real numbers, else None."""
    gaussians = {release: count for release, count in counts.items() if isinstance(release, GaussianRelease)}
    return gaussians if len(gaussians) == len(counts) else None


def _by_distribution(counts: Mapping[GaussianRelease, int]) -> "PrivacyAccountant":
    """Return an accountant of privacy loss distributions that holds all releases."""
    library = _library()
    accountant = library.pld.PLDAccountant()
    # Gaussians without sampling compose to one, exactly.
    plain = sum(count / each.noise_multiplier**2 for each, count in counts.items() if each.sampling_rate == 1)
    if plain:
        accountant.compose(library.GaussianDpEvent(1 / math.sqrt(plain)))
    for each, count in counts.items():
        if each.sampling_rate < 1:
            event = library.GaussianDpEvent(each.noise_multiplier)
            accountant.compose(library.PoissonSampledDpEvent(each.sampling_rate, event), count)
    return accountant


def _divergences(counts: Mapping[Release, int]) -> Float64s:
    """Return the Renyi divergence of all releases together, of each order."""
    divergences = np.zeros(len(RDP_ORDERS))
    for each, count in counts.items():
        match each:
            case PlainRelease():
                divergences += count * (float(each.loss.rho) * np.array(RDP_ORDERS) + float(each.loss.xi))
            case SampledRelease() | GaussianRelease():
                divergences += count * _divergences_of(each.noise_multiplier, each.sampling_rate)
            case _:
                assert_never(each)
    return divergences * OUTWARD


@lru_cache(maxsize=CACHED_RELEASES)
def _divergences_of(noise_multiplier: float, sampling_rate: float) -> Float64s:
    """Return the Renyi divergences of one sampled release. It takes some 30 ms, so a ledger keeps them."""
    if noise_multiplier == math.inf:
        return np.zeros(len(RDP_ORDERS))
    library = _library()
    event = library.PoissonSampledDpEvent(sampling_rate, library.GaussianDpEvent(noise_multiplier))
    divergences = library.rdp.RdpAccountant(orders=RDP_ORDERS).compose(event).rdp
    return np.asarray(np.maximum(divergences, 0) + ROUNDING)
